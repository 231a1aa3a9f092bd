"""The commands of the command line that export: each module has `add_arguments` and `main`."""
