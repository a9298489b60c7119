"""The paper's experiments as commands: one file per experiment, and what they share.

methods.py    what is compared           scale.py   how large: datasets, recipes, seeds
records.py    one JSON file per training  runner.py  trains what has no record yet
lora.py       LoRA, by peft               cost.py    what a run will cost, from a short timing
"""
