"""Models from timm by name, with their pretrained weights."""

from torch import nn

from vit_memory.errors import BackboneError


def load(name: str) -> nn.Module:
    """A pretrained timm model; `name` is anything `timm.create_model` takes, `local-dir:FOLDER` included."""
    import timm

    try:
        model: nn.Module = timm.create_model(name, pretrained=True)
    except (OSError, RuntimeError, ValueError) as error:
        close = timm.list_models(f"*{name.split('.', maxsplit=1)[0]}*")[:5]
        hint = f" Names like it: {', '.join(close)}." if close else " timm.list_models('vit_*') lists the names."
        raise BackboneError(
            f"timm:{name}: cannot be loaded; timm says: {str(error).strip().splitlines()[0]}.{hint}"
        ) from error
    return model
