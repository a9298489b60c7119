"""What the transformers families share: finding modules by path, the attention call, blocks, preprocessing.

Paths are data and may list alternatives, the newest release's name first: `layers|encoder.layer` is transformers 5,
then 4. So a renamed module is one edited string.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vit_memory.errors import UnsupportedFamily
from vit_memory.families.roles import Block, Embed, Finish, Roles
from vit_memory.outputs import Original
from vit_memory.preprocessing import Interpolation, Preprocessing

# Pillow's numbers, which image processors store.
_INTERPOLATIONS: Mapping[int, Interpolation] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}


class Elementwise(nn.Module):
    """A plain function as a module, for releases that keep activations as functions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.function(x)


class Gated(nn.Module):
    """The first half of a gated MLP, `act(gate(x)) * up(x)`, over the library's own modules."""

    def __init__(self, gate: nn.Module, act: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.gate, self.act, self.up = gate, act, up

    def forward(self, x: Tensor) -> Tensor:
        """Rows (R, D) to (R, hidden)."""
        gated: Tensor = self.act(self.gate(x)) * self.up(x)
        return gated


def find(module: nn.Module, path: str) -> Any:
    """The first of the alternatives in `path` ('a.b|c') that `module` has; an UnsupportedFamily names all of them."""
    for alternative in path.split("|"):
        part: Any = module
        for name in alternative.split("."):
            part = getattr(part, name, None)
            if part is None:
                break
        if part is not None:
            return part
    raise UnsupportedFamily(
        f"{type(module).__module__}.{type(module).__qualname__} has none of: {path.replace('|', ', ')}. "
        f"This release of transformers may have renamed it; the layouts of 4.56 and later are known."
    )


def optional(module: nn.Module, path: str) -> Any:
    """Like `find`, but None where there is none."""
    try:
        return find(module, path)
    except UnsupportedFamily:
        return None


def as_module(part: Any) -> nn.Module:
    """Activations are modules in some releases and functions in others."""
    return part if isinstance(part, nn.Module) else Elementwise(part)


@dataclass(frozen=True, slots=True, eq=False)
class LibraryAttention:
    """transformers' own attention call, with whatever implementation the model's configuration names."""

    module: nn.Module
    scaling: float

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three (B, H, N, A/H) in, (B, N, A) out."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        eager = sys.modules[type(self.module).__module__].eager_attention_forward
        implementation = self.module.config._attn_implementation  # type: ignore[union-attr]
        call = eager if implementation == "eager" else ALL_ATTENTION_FUNCTIONS[implementation]
        attended, _ = call(self.module, q, k, v, None, dropout=0.0, scaling=self.scaling)
        out: Tensor = attended.reshape(*attended.shape[:2], -1)
        return out


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where a transformers block keeps its parts."""

    norm1: str = "layernorm_before"
    norm2: str = "layernorm_after"
    attention: str = "attention.attention|attention"  # the module that the attention call is made for
    q: str = "attention.q_proj|attention.attention.query"
    k: str = "attention.k_proj|attention.attention.key"
    v: str = "attention.v_proj|attention.attention.value"
    project: str = "attention.o_proj|attention.output.dense"
    scale1: str = ""
    scale2: str = ""
    up: str = "mlp.fc1|intermediate.dense"
    act: str = "mlp.activation_fn|mlp.activation|mlp.act_fn|intermediate.intermediate_act_fn"
    down: str = "mlp.fc2|output.dense"

    def block(self, layer: nn.Module) -> Block:
        """The roles of one layer."""
        attention = find(layer, self.attention)
        scaling = float(find(attention, "scaling|scale"))
        return Block(
            norm1=find(layer, self.norm1),
            qkv=(find(layer, self.q), find(layer, self.k), find(layer, self.v)),
            norm_q=nn.Identity(),
            norm_k=nn.Identity(),
            attend=LibraryAttention(attention, scaling),
            scaling=scaling,
            project=(find(layer, self.project),),
            scale1=find(layer, self.scale1) if self.scale1 else nn.Identity(),
            norm2=find(layer, self.norm2),
            mlp=self._mlp(layer),
            scale2=find(layer, self.scale2) if self.scale2 else nn.Identity(),
        )

    def _mlp(self, layer: nn.Module) -> tuple[nn.Module, ...]:
        gate = optional(layer, "mlp.gate_proj")
        if gate is not None:
            up, down = find(layer, "mlp.up_proj"), find(layer, "mlp.down_proj")
            return (Gated(gate, as_module(find(layer, "mlp.act_fn")), up), down)
        if optional(layer, "mlp.weights_in") is not None:  # transformers 4: both halves in one product
            return (layer.mlp,)  # type: ignore[return-value]
        return (find(layer, self.up), as_module(find(layer, self.act)), find(layer, self.down))


def core_of(model: nn.Module, *paths: str) -> nn.Module:
    """The module that embeds: the model itself or the first of `paths` that has `embeddings`."""
    for candidate in (model, *(optional(model, path) for path in paths)):
        if candidate is not None and hasattr(candidate, "embeddings"):
            core: nn.Module = candidate
            return core
    raise UnsupportedFamily(
        f"{type(model).__module__}.{type(model).__qualname__} has no embeddings of its own "
        f"and none under {', '.join(paths)}: is it a whole vision model?"
    )


def pair(size: Any) -> tuple[int, int]:
    """A size as (height, width); configurations hold one number or two."""
    if isinstance(size, int):
        return size, size
    height, width = size
    return int(height), int(width)


@dataclass(frozen=True, slots=True)
class AtLeastOnePatch:
    """Any size that holds a patch: these models resample positions and cut what is left over."""

    patch: tuple[int, int]

    def __call__(self, height: int, width: int) -> str | None:
        """Say what is wrong with a size, or nothing."""
        if height < self.patch[0] or width < self.patch[1]:
            return f"smaller than one patch of {self.patch[0]} × {self.patch[1]}"
        return None


def read_preprocessing(source: str) -> Preprocessing | None:
    """Facts from `preprocessor_config.json` of a folder, or of an id through the hub's cache; None if it has none."""
    from transformers import BaseImageProcessor

    if Path(source).is_dir() and not (Path(source) / "preprocessor_config.json").exists():
        return None
    try:
        stored, _ = BaseImageProcessor.get_image_processor_dict(source)
    except OSError:  # no such file there, or no way to ask: the caller may pass the facts
        return None
    size = stored.get("size", {})
    size = {"shortest_edge": size} if isinstance(size, int) else size
    resize: int | tuple[int, int] | None = size.get("shortest_edge")
    if "height" in size:
        resize = (size["height"], size["width"])
    crop = stored.get("crop_size")
    if isinstance(crop, Mapping):
        crop = (crop["height"], crop["width"])
    elif isinstance(crop, int):
        crop = (crop, crop)
    return Preprocessing(
        resize=resize if stored.get("do_resize", True) else None,
        crop=crop if stored.get("do_center_crop", False) else None,
        mean=tuple(stored.get("image_mean") or (0.5, 0.5, 0.5)) if stored.get("do_normalize", True) else (0.0,) * 3,
        std=tuple(stored.get("image_std") or (0.5, 0.5, 0.5)) if stored.get("do_normalize", True) else (1.0,) * 3,
        interpolation=_INTERPOLATIONS[stored.get("resample", 2)],
        # DINOv3's processor alone scales to 0..1 before it resizes.
        resampler="torch-float" if str(stored.get("image_processor_type", "")).startswith("DINOv3") else "torch",
    )


@dataclass(frozen=True, slots=True)
class TransformersFamily:
    """What every family of transformers answers alike."""

    name: str
    packages: tuple[str, ...]  # under transformers.models
    cores: tuple[str, ...] = ()  # where a model with a head keeps the ViT
    layout: BlockLayout = BlockLayout()
    layers: str = "layers|encoder.layer"  # where the ViT keeps its blocks
    norm: str = "layernorm"  # where it keeps its final norm
    library: str = "transformers"

    def accepts(self, model: nn.Module) -> bool:
        """By class."""
        homes = tuple(f"transformers.models.{package}." for package in self.packages)
        return any(cls.__module__.startswith(homes) for cls in type(model).__mro__)

    def core(self, model: nn.Module) -> Any:
        """The ViT of a model that may hold more."""
        return core_of(model, *self.cores)

    def roles_of(
        self,
        core: Any,
        *,
        prefix: tuple[str, ...],
        embed: Embed,
        finish: Finish,
        stem: Mapping[str, nn.Module | Tensor | None],
        class_token: Tensor | None = None,
        class_position: Tensor | None = None,
    ) -> Roles:
        """The roles of a ViT without a norm before its first block and without rotary positions."""
        config = core.config
        patch_size = pair(config.patch_size)
        return Roles(
            width=config.hidden_size,
            heads=config.num_attention_heads,
            channels=config.num_channels,
            patch_size=patch_size,
            image_size=pair(config.image_size),
            prefix=prefix,
            embed=embed,
            pre_norm=nn.Identity(),
            blocks=tuple(self.layout.block(layer) for layer in find(core, self.layers)),
            rotate=None,
            final_norm=find(core, self.norm),
            finish=finish,
            check_size=AtLeastOnePatch(patch_size),
            stem=stem,
            class_token=class_token,
            class_position=class_position,
        )

    def preprocessing(self, model: nn.Module) -> Preprocessing | None:
        """From the image processor stored beside the weights, where the model still knows where that is."""
        source = getattr(model.config, "_name_or_path", "") or ""
        return read_preprocessing(source) if source else None


@dataclass(frozen=True, slots=True, eq=False)
class Interpolating:
    """Embeddings that resample their positions only when told to (ViT, DeiT, MSN)."""

    embeddings: nn.Module
    image_size: tuple[int, int]

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        """Original tokens (B, N, D), positions included."""
        other_size = tuple(images.shape[-2:]) != self.image_size
        return self.embeddings(images, interpolate_pos_encoding=other_size), None


@dataclass(frozen=True, slots=True, eq=False)
class NormThenHeads:
    """The common ending: norm over all tokens, a pooler or a classifier on the class token."""

    norm: nn.Module
    pooler: Callable[[Tensor], Tensor] | None
    classifier: nn.Module | None

    def __call__(self, tokens: Tensor) -> Original:
        """Last block's output (B, N, D) to what the library returns."""
        tokens = self.norm(tokens)
        return Original(
            tokens=tokens,
            feature=tokens[:, 0, :],
            pooled=self.pooler(tokens) if self.pooler is not None else None,
            logits=self.classifier(tokens[:, 0, :]) if self.classifier is not None else None,
        )


def fields_of(output: Any) -> dict[str, Tensor]:
    """A transformers output as fields of `Original`."""
    names = {"last_hidden_state": "tokens", "pooler_output": "pooled", "image_embeds": "pooled", "logits": "logits"}
    return {ours: output[theirs] for theirs, ours in names.items() if output.get(theirs) is not None}


def forward_at_any_size(model: nn.Module, images: Tensor, image_size: tuple[int, int]) -> dict[str, Tensor]:
    """The library's own forward, resampling positions where the size is another than the pretraining one."""
    other_size = tuple(images.shape[-2:]) != image_size
    return fields_of(model(pixel_values=images, **({"interpolate_pos_encoding": True} if other_size else {})))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainViT(TransformersFamily):
    """transformers' ViT and its near copies: class token first, learned positions, norm and head on the class token."""

    prefix: tuple[str, ...]
    tiny: Callable[[], Mapping[str, Callable[[], nn.Module]]]

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        core = self.core(model)
        embeddings: Any = core.embeddings
        return self.roles_of(
            core,
            prefix=self.prefix,
            embed=Interpolating(embeddings, pair(core.config.image_size)),
            finish=self.finish(model, core, find(core, self.norm), optional(model, "classifier")),
            stem={
                "patches": embeddings.patch_embeddings.projection,
                "class": embeddings.cls_token,
                "extra": optional(embeddings, "distillation_token"),
                "positions": embeddings.position_embeddings,
            },
            class_token=embeddings.cls_token,
            class_position=embeddings.position_embeddings[:, 0].detach(),  # a graph could not be copied
        )

    def finish(self, model: nn.Module, core: nn.Module, norm: nn.Module, classifier: nn.Module | None) -> Finish:
        """How the library ends."""
        return NormThenHeads(norm, optional(core, "pooler"), classifier)

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own forward, which our passes must equal."""
        return forward_at_any_size(model, images, self.roles(model).image_size)

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models."""
        return self.tiny()
