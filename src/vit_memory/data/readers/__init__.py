"""Readers of labelled images, one file per layout. `data/sources.py` lists them."""
