"""A pretrained ViT as its library made it: frozen, in eval mode, and never modified.

`load_backbone` wraps the model's modules anew around the same weights, so that freezing, moving or casting a backbone
leaves the caller's own model as it was.
"""

import copy
import hashlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vit_memory.errors import BackboneError, ImageError
from vit_memory.families import Family, bundled, family_of
from vit_memory.families.roles import Roles
from vit_memory.preprocessing import Preprocessing


@dataclass(frozen=True, slots=True)
class BackboneIdentity:
    """What a task remembers of the backbone it was trained on."""

    name: str
    family: str
    width: int
    depth: int
    heads: int
    fingerprint: str


class Backbone(nn.Module):
    """A frozen ViT with its parts by role. Made by `load_backbone`."""

    def __init__(self, model: nn.Module, family: Family, name: str, preprocessing: Preprocessing | None) -> None:
        super().__init__()
        self.model = model
        self.family = family
        self.name = name
        self.preprocessing = preprocessing
        self.roles: Roles = family.roles(model)
        self._fingerprint: str | None = None
        # Frozen is all that a class token passes, for training runs through it. What only the original output passes
        # keeps its flags, and never sees a graph: torch multiplies an expanded tensor (attention pooling has one) in
        # another order when the weight wants a gradient, and the library's own output is to be met to the bit.
        for module in self.roles.class_token_modules():
            module.requires_grad_(False)

    @property
    def width(self) -> int:
        """D."""
        return self.roles.width

    @property
    def depth(self) -> int:
        """L."""
        return len(self.roles.blocks)

    @property
    def heads(self) -> int:
        """H."""
        return self.roles.heads

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are held and computed in."""
        return next(self.model.parameters()).dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.model.parameters()).device

    @property
    def fingerprint(self) -> str:
        """A digest of the weights by role, as loaded, before any cast: the same for every library and file layout."""
        if self._fingerprint is None:
            digest = hashlib.sha256()
            for role, weight in self.roles.weights():
                # Half-precision values keep their meaning in float32, so a file and its exact upcast agree.
                values = weight.detach().to("cpu", torch.float32).contiguous()
                digest.update(f"{role}:{values.numel()};".encode())
                digest.update(values.numpy().data)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    @property
    def identity(self) -> BackboneIdentity:
        """What tasks trained on this backbone remember."""
        return BackboneIdentity(self.name, self.family.name, self.width, self.depth, self.heads, self.fingerprint)

    def initial_class_token(self) -> Tensor:
        """Where a new task's class token starts: the original one with its position (D,), or zero without one."""
        return self.roles.initial_class_token()

    def check_images(self, images: Tensor) -> Tensor:
        """Images (B, C, height, width) in the backbone's dtype, or an ImageError that says what is wrong with them."""
        roles = self.roles
        expected = f"(B, {roles.channels}, height, width)"
        if not isinstance(images, Tensor):
            raise ImageError(f"images are a {type(images).__name__}; {self.name} reads a tensor {expected}.")
        shape = tuple(images.shape)
        if images.dim() != 4 or shape[1] != roles.channels:
            hint = " For one image, add the batch axis: images[None]." if images.dim() == 3 else ""
            raise ImageError(f"images have shape {shape}; {self.name} reads {expected}.{hint}")
        if not images.is_floating_point():
            raise ImageError(
                f"images are {images.dtype}; {self.name} reads floating-point pixels, normalised by its preprocessing: "
                f"{self.preprocessing or 'not known for this backbone'}."
            )
        if shape[0] == 0:
            raise ImageError(f"the batch is empty: images have shape {shape}.")
        problem = roles.check_size(shape[2], shape[3])
        if problem is not None:
            raise ImageError(f"images of {shape[2]} × {shape[3]} pixels: {problem}.")
        if images.device != self.device:
            raise ImageError(f"images are on {images.device}, {self.name} is on {self.device}: move one of them.")
        if not torch.compiler.is_compiling() and not bool(images.sum().isfinite()):
            # The sum is the cheap question; half precision may overflow in it, so ask again before refusing.
            bad = (~images.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
            if bad:
                raise ImageError(f"images {bad} of the batch hold NaN or infinite pixels.")
        return images.to(self.dtype)

    def train(self, mode: bool = True) -> "Backbone":
        """Stays in eval mode: dropout or stochastic depth would change what it already does."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Backbone":
        self.fingerprint  # noqa: B018 - taken before any cast changes the weights
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.roles = self.family.roles(self.model)
        return self

    def extra_repr(self) -> str:
        """One line for print."""
        return f"{self.name}, family {self.family.name}, width {self.width}, {self.depth} blocks, {self.heads} heads"


def load_backbone(
    source: str | Path | nn.Module,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
    preprocessing: Preprocessing | None = None,
) -> Backbone:
    """Take a pretrained ViT from where it is.

    `source` is `bundled`, a Hugging Face id or folder, `timm:<model name>`, or a live transformers or timm model, which
    is never changed: the backbone shares its weights and nothing else. Names and folders are computed in float32 unless
    `dtype` says otherwise; a live model keeps its dtype. `preprocessing` overrides what the model knows of itself.

    >>> from transformers import ViTConfig, ViTModel
    >>> model = ViTModel(ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64))
    >>> load_backbone(model).width
    32
    """
    if isinstance(source, nn.Module):
        model, known_as = source, _name_of(source)
    else:
        model, known_as = _load(str(source)), str(source)
        dtype = dtype or torch.float32
    family = family_of(model)
    shell = _frozen_shell(model)
    backbone = Backbone(shell, family, name or known_as, preprocessing or family.preprocessing(model))
    backbone.train(False)
    _keep_freed_memory()
    stays = torch.device(device or backbone.device) == backbone.device and (dtype or backbone.dtype) == backbone.dtype
    return backbone if stays else backbone.to(device=device, dtype=dtype)


def _keep_freed_memory() -> None:
    """Have the C allocator keep what one block of a pass frees for the next.

    glibc hands back to the system what is free beyond twice the largest piece it was ever given back, and a page that
    is taken anew costs more than what is written to it: 17 % of a pass of ViT-B/32 over 16 images, where the free
    memory happened to lie together. The largest piece that this rule looks at, 32 MB, is taken here and given back
    untouched. Other allocators do not mind.
    """
    torch.empty(31 * 2**20, dtype=torch.uint8)


def _frozen_shell(model: nn.Module) -> nn.Module:
    """The same modules anew around the same weights: own flags and places, shared storage."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in model.parameters()}
    memo.update({id(b): b.detach() for b in model.buffers()})
    return copy.deepcopy(model, memo).eval()


def _name_of(model: nn.Module) -> str:
    stored = getattr(getattr(model, "config", None), "_name_or_path", "")
    timm_name = (getattr(model, "pretrained_cfg", None) or {}).get("architecture", "")
    return stored or (f"timm:{timm_name}" if timm_name else type(model).__name__)


def _load(source: str) -> nn.Module:
    if source == "bundled":
        return bundled.load()
    library = "timm" if source.startswith("timm:") else "transformers"
    if importlib.util.find_spec(library) is None:
        raise BackboneError(f"{source}: needs {library}, which is not installed: pip install 'vit-memory[{library}]'")
    loader = importlib.import_module(f"vit_memory.families.load_{library}")
    model: nn.Module = loader.load(source.removeprefix("timm:"))
    return model
