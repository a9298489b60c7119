"""Image data: sources, splits, decoding, transforms, batches."""
