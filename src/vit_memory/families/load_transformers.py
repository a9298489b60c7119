"""Models from Hugging Face folders and ids, through transformers, with every weight accounted for."""

from pathlib import Path
from typing import Any

from torch import nn

from vit_memory.errors import BackboneError


def load(source: str) -> nn.Module:
    """The model in the class its files name, in the dtype they store. Refuses files that leave a weight random."""
    import transformers

    folder = Path(source)
    if (folder / "bundle.json").exists():
        raise BackboneError(f"{source}: a bundle of tasks, not a backbone. vit-memory certify checks a bundle.")
    if folder.exists() and not (folder / "config.json").exists():
        raise BackboneError(f"{source}: no config.json here. A backbone folder is what save_pretrained() writes.")
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        cls = _class_for(config)
        model, report = cls.from_pretrained(source, dtype="auto", output_loading_info=True)
        missing = set(report["missing_keys"])
        if missing and all("pooler." in key for key in missing):  # a headless file under a class with a pooler
            model = cls.from_pretrained(source, dtype="auto", add_pooling_layer=False)
            missing = set()
    except (OSError, ValueError, RuntimeError) as error:
        raise BackboneError(
            f"{source}: cannot be loaded. It is {'a folder' if folder.exists() else 'no folder here'}, "
            f"and transformers says: {str(error).strip().splitlines()[0]}"
        ) from error
    if missing:
        raise BackboneError(
            f"{source}: {len(missing)} weights of {cls.__name__} are not in the file and would be random: "
            f"{', '.join(sorted(missing)[:5])}{' …' if len(missing) > 5 else ''}. "
            f"Give a whole checkpoint, or load the model yourself and pass it to load_backbone."
        )
    loaded: nn.Module = model
    return loaded


def _class_for(config: Any) -> Any:
    """The class that wrote the file where it still exists, so that its head comes along; else the plain model."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return transformers.AutoModel
