"""The format of a store on disk: a folder named by its key, a digest of everything that decides its content.

store.json    what it holds, for people
trunks.bin    rows × (L, 2, H, N, A/H): keys and values of every block, memory-mapped
features.bin  rows × (2, D) float32: what `head` tasks read, and the mean of the final patch tokens, memory-mapped
done.bin      one byte per row: 0 not yet, 1 stored; written only after the row itself is on disk

A row is one view of one image. `store_tensors.py` maps these files, `trunk_store.py` computes and reads the rows,
`stores.py` lists and removes stores; it reads this file alone, so that `vit-memory cache` does not wait for torch.
"""

FORMAT = "vit-memory-store/2"
ABOUT, TRUNKS, FEATURES, DONE = "store.json", "trunks.bin", "features.bin", "done.bin"
KEY_LENGTH = 32
