"""The HTTP server: `ostinato serve`. See README.md beside this file."""
