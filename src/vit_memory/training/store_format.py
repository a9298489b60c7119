"""The format of a store on disk: a folder named by its key, a digest of everything that decides its content.

store.json    what it holds, for people
trunks.bin    rows × (blocks, 2, H, N, A/H): keys and values of every block, then of every block of each branch
features.bin  rows × (trunks, 2, D) float32: per trunk, what `head` tasks read and the mean of the final patch tokens
tokens.bin    rows × (starts, N, D): the tokens that enter certain blocks, where a branch is trained
done.bin      one byte per row: 0 not yet, 1 stored; written only after the row itself is on disk

A row is one view of one image. A store has trunks and features, or, for the training of branches, tokens and the trunks
of the blocks before them. All files are memory-mapped. `row_formats.py` computes rows, `store_tensors.py` maps these
files, `trunk_store.py` fills and reads them, `stores.py` lists and removes stores; it reads this file alone, so that
`vit-memory cache` does not wait for torch.
"""

FORMAT = "vit-memory-store/2"
ABOUT, TRUNKS, FEATURES, TOKENS, DONE = "store.json", "trunks.bin", "features.bin", "tokens.bin", "done.bin"
KEY_LENGTH = 32
