"""Images in: sources, splits, decoding, transforms, batches."""
