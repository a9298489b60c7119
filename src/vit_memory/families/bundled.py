"""The backbone in the box: a small ViT that this project trains itself and ships beside this file.

64 × 64 pixels in patches of 8, 5.2 M parameters. `scripts/pretrain_bundled.py` made the weights; `bundled.md` is their
card. Plain torch, so that it works after `pip install vit-memory` and nothing else.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file, files

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.errors import BackboneError
from vit_memory.families.roles import Block, Roles
from vit_memory.families.tiny import randomised
from vit_memory.outputs import Original
from vit_memory.preprocessing import Preprocessing

WEIGHTS = "bundled.safetensors"
PREPROCESSING = Preprocessing(
    resize=64, crop=(64, 64), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bicubic"
)


class BundledAttention(nn.Module):
    """Attention with one matrix for queries, keys and values."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three (B, H, N, D/H) in, (B, N, D) out."""
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, D) in and out."""
        B, N, D = tokens.shape
        q, k, v = self.qkv(tokens).view(B, N, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        attended: Tensor = self.project(self.attend(q, k, v))
        return attended


class BundledBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = BundledAttention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, D) in and out."""
        tokens = tokens + self.attention(self.norm1(tokens))
        thought: Tensor = self.mlp(self.norm2(tokens))
        return tokens + thought


class BundledViT(nn.Module):
    """A plain ViT with a class token and learned positions, which are interpolated for other image sizes.

    Its patches overlap: three convolutions of stride 2 make a token of every 8 × 8 pixels and a little around them.
    With 31 000 images to learn from, one large stride learns half as fast.
    """

    def __init__(
        self,
        *,
        width: int = 256,
        depth: int = 6,
        heads: int = 4,
        hidden: int = 1024,
        stem: tuple[int, int, int] = (64, 128, 256),
        image: int = 64,
    ) -> None:
        super().__init__()
        self.patch = 2 ** len(stem)
        self.grid = image // self.patch
        layers: list[nn.Module] = []
        for before, after in zip((3, *stem), stem, strict=False):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(1, after), nn.GELU()]
        self.patches = nn.Sequential(*layers, nn.Conv2d(stem[-1], width, 1))
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.class_position = nn.Parameter(torch.zeros(1, 1, width))
        self.patch_positions = nn.Parameter(torch.zeros(1, self.grid**2, width))
        self.blocks = nn.ModuleList([BundledBlock(width, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=1e-6)

    def embed(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width) to tokens (B, N, D), class token first."""
        patches = self.patches(images)  # (B, D, rows, columns)
        rows, columns = patches.shape[-2:]
        positions: Tensor = self.patch_positions
        if (rows, columns) != (self.grid, self.grid):
            square = positions.transpose(1, 2).unflatten(2, (self.grid, self.grid))
            square = F.interpolate(square, (rows, columns), mode="bicubic", antialias=True)
            positions = square.flatten(2).transpose(1, 2)
        patches = patches.flatten(2).transpose(1, 2) + positions
        # not len(images), which torch.export takes for a constant
        first = (self.class_token + self.class_position).expand(images.shape[0], -1, -1)
        return torch.cat([first, patches], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, height, width) to final tokens (B, N, D); the first is the image's feature."""
        tokens = self.embed(images)
        for block in self.blocks:
            tokens = block(tokens)
        final: Tensor = self.norm(tokens)
        return final


def load() -> BundledViT:
    """The shipped weights, in the half precision they are stored in."""
    from safetensors.torch import load_file

    resource = files(__package__).joinpath(WEIGHTS)
    if not resource.is_file():
        raise BackboneError(
            f"{resource}: the bundled backbone's weights are missing from this installation. Reinstall vit-memory, "
            f"or give another backbone: a Hugging Face id, a folder or timm:<name>."
        )
    with as_file(resource) as path:
        weights = load_file(path)
    model = BundledViT().half()
    model.load_state_dict(weights)
    return model.eval()


@dataclass(frozen=True, slots=True, eq=False)
class BundledEmbed:
    """Everything before the first block."""

    model: BundledViT

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        """Original tokens (B, N, D); positions do not rotate."""
        return self.model.embed(images), None


@dataclass(frozen=True, slots=True, eq=False)
class BundledEnding:
    """The final norm; the class token's output is the feature."""

    model: BundledViT

    def __call__(self, tokens: Tensor) -> Original:
        """Last block's output (B, N, D) to what the model returns."""
        tokens = self.model.norm(tokens)
        return Original(tokens=tokens, feature=tokens[:, 0])


@dataclass(frozen=True, slots=True)
class WholePatches:
    """Any size that the patches divide."""

    patch: int

    def __call__(self, height: int, width: int) -> str | None:
        """Say what is wrong with a size, or nothing."""
        if height < self.patch or width < self.patch or height % self.patch or width % self.patch:
            return f"not a multiple of the patch, {self.patch} × {self.patch}"
        return None


@dataclass(frozen=True, slots=True)
class BundledFamily:
    """This project's own layout."""

    name: str = "bundled"
    library: str = "vit-memory"

    def accepts(self, model: nn.Module) -> bool:
        """Whether this model is ours."""
        return isinstance(model, BundledViT)

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        assert isinstance(model, BundledViT)  # accepts() said so
        side = model.grid * model.patch
        return Roles(
            width=model.norm.normalized_shape[0],
            heads=model.blocks[0].attention.heads,  # type: ignore[union-attr, arg-type]
            channels=3,
            patch_size=(model.patch, model.patch),
            image_size=(side, side),
            prefix=("class",),
            embed=BundledEmbed(model),
            pre_norm=nn.Identity(),
            blocks=tuple(_block(block) for block in model.blocks),
            rotate=None,
            final_norm=model.norm,
            finish=BundledEnding(model),
            check_size=WholePatches(model.patch),
            stem={
                "patches": model.patches,
                "class_token": model.class_token,
                "class_position": model.class_position,
                "patch_positions": model.patch_positions,
            },
            class_token=model.class_token,
            class_position=model.class_position,
        )

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        """What it was trained with."""
        return PREPROCESSING

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The model's own forward."""
        tokens: Tensor = model(images)
        return {"tokens": tokens, "feature": tokens[:, 0]}

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """One small random model."""
        return {
            "bundled": lambda: randomised(BundledViT(width=32, depth=3, heads=4, hidden=64, stem=(8, 8, 16), image=32))
        }


def _block(block: nn.Module) -> Block:
    assert isinstance(block, BundledBlock)
    attention = block.attention
    return Block(
        norm1=block.norm1,
        qkv=(attention.qkv,),
        norm_q=nn.Identity(),
        norm_k=nn.Identity(),
        attend=attention.attend,
        scaling=(attention.qkv.in_features // attention.heads) ** -0.5,
        project=(attention.project,),
        scale1=nn.Identity(),
        norm2=block.norm2,
        mlp=tuple(block.mlp),
        scale2=nn.Identity(),
    )


FAMILY = BundledFamily()
