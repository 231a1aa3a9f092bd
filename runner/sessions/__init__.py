"""Conversations over one model: slots, pages, history, and their warm-up."""
