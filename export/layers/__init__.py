"""The layers that families of models are made of. Layers take sizes and formats, never a family's config."""
