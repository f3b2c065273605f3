"""Indexed token files, GPT sample order, blending and batches. Importing it imports no numpy or torch."""
