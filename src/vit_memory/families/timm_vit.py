"""timm's VisionTransformer: augreg, DeiT, DINOv2 and CLIP variants, with fused qkv and heads of every pooling."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from vit_memory.errors import UnsupportedFamily
from vit_memory.families.roles import Block, Roles
from vit_memory.families.tiny import randomised
from vit_memory.outputs import Original
from vit_memory.preprocessing import Preprocessing


@dataclass(frozen=True, slots=True, eq=False)
class TimmAttention:
    """timm's attention between its norms of queries and keys and its projection."""

    module: Any

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three (B, H, N, A/H) in, (B, N, A) out."""
        if self.module.fused_attn:
            attended = F.scaled_dot_product_attention(q, k, v)
        else:
            attended = ((q * self.module.scale) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        return attended.transpose(1, 2).flatten(2)


@dataclass(frozen=True, slots=True, eq=False)
class TimmEmbed:
    """Everything before the first block, by the library's own methods."""

    model: Any

    def __call__(self, images: Tensor) -> tuple[Tensor, None]:
        """Original tokens (B, N, D) as they enter the first block."""
        return self.model.norm_pre(self.model._pos_embed(self.model.patch_embed(images))), None


@dataclass(frozen=True, slots=True, eq=False)
class TimmEnding:
    """The library's own norm, pooling and head."""

    model: Any

    def __call__(self, tokens: Tensor) -> Original:
        """Last block's output (B, N, D) to what the library returns."""
        model = self.model
        tokens = model.norm(tokens)
        if hasattr(model, "head_dist"):  # the mean of two heads on two tokens
            return Original(tokens=tokens, feature=tokens[:, 0], logits=model.forward_head(tokens))
        feature = model.forward_head(tokens, pre_logits=True)
        logits = None if isinstance(model.head, nn.Identity) else model.head(feature)
        if feature.dim() == 3:  # no pooling: the library hands the tokens on
            feature = feature[:, 0] if model.cls_token is not None else feature.mean(dim=1)
        return Original(tokens=tokens, feature=feature, logits=logits)


@dataclass(frozen=True, slots=True)
class TimmSize:
    """timm takes other sizes only from models made with `dynamic_img_size`."""

    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    dynamic: bool
    pads: bool

    def __call__(self, height: int, width: int) -> str | None:
        """Say what is wrong with a size, or nothing."""
        if not self.dynamic and (height, width) != self.image_size:
            return (
                f"this timm model takes {self.image_size[0]} × {self.image_size[1]} only; "
                f"create it with dynamic_img_size=True for other sizes"
            )
        if not self.pads and (height % self.patch_size[0] or width % self.patch_size[1]):
            return f"not a multiple of the patch, {self.patch_size[0]} × {self.patch_size[1]}"
        return None


def _require(holds: bool, model: nn.Module, what: str) -> None:
    if not holds:
        raise UnsupportedFamily(f"{type(model).__module__}.{type(model).__qualname__}: {what} is not supported.")


def _without_identities(*modules: nn.Module) -> tuple[nn.Module, ...]:
    return tuple(module for module in modules if not isinstance(module, nn.Identity))


def _block(model: nn.Module, block: Any) -> Block:
    _require(type(block).__name__ == "Block", model, f"a block of type {type(block).__name__}")
    attention = block.attn
    _require(type(attention).__name__ == "Attention", model, f"attention of type {type(attention).__name__}")
    _require(getattr(attention, "gate", None) is None, model, "gated attention")
    mlp = block.mlp
    stages: tuple[nn.Module, ...] = (mlp,)  # gated ones as they are
    if type(mlp).__name__ == "Mlp":
        stages = _without_identities(mlp.fc1, mlp.act, mlp.norm, mlp.fc2)
    return Block(
        norm1=block.norm1,
        qkv=(attention.qkv,),
        norm_q=attention.q_norm,
        norm_k=attention.k_norm,
        attend=TimmAttention(attention),
        scaling=attention.scale,
        project=_without_identities(getattr(attention, "norm", nn.Identity()), attention.proj),
        scale1=block.ls1,
        norm2=block.norm2,
        mlp=stages,
        scale2=block.ls2,
    )


@dataclass(frozen=True, slots=True)
class TimmViT:
    """`timm.models.VisionTransformer` and its distilled subclass."""

    name: str = "timm-vit"
    library: str = "timm"

    def accepts(self, model: nn.Module) -> bool:
        """By class."""
        names = {f"{cls.__module__}.{cls.__name__}" for cls in type(model).__mro__}
        return "timm.models.vision_transformer.VisionTransformer" in names

    def roles(self, model: nn.Module) -> Roles:
        """Where the parts are."""
        timm_model: Any = model
        patches = timm_model.patch_embed
        _require(patches.img_size is not None, model, "a patch embedding without an image size")
        blocks = tuple(_block(model, block) for block in timm_model.blocks)
        distillation = getattr(timm_model, "dist_token", None)
        prefix = (
            *(("class",) if timm_model.cls_token is not None else ()),
            *(("distillation",) if distillation is not None else ()),
            *("register",) * getattr(timm_model, "num_reg_tokens", 0),
        )
        no_position = timm_model.no_embed_class or timm_model.pos_embed is None or timm_model.cls_token is None
        extra = distillation if distillation is not None else getattr(timm_model, "reg_token", None)
        pooling = getattr(timm_model, "attn_pool", None)
        return Roles(
            width=timm_model.embed_dim,
            heads=timm_model.blocks[0].attn.num_heads,
            channels=patches.proj.in_channels,
            patch_size=tuple(patches.patch_size),
            image_size=tuple(patches.img_size),
            prefix=prefix,
            embed=TimmEmbed(model),
            pre_norm=timm_model.norm_pre,
            blocks=blocks,
            rotate=None,
            # One of the two is Identity: with pooled heads the norm comes after the pooling.
            final_norm=timm_model.fc_norm if isinstance(timm_model.norm, nn.Identity) else timm_model.norm,
            finish=TimmEnding(model),
            check_size=TimmSize(
                tuple(patches.img_size), tuple(patches.patch_size), timm_model.dynamic_img_size, patches.dynamic_img_pad
            ),
            stem={
                "patches": patches,
                "class": timm_model.cls_token,
                "extra": extra,
                "positions": timm_model.pos_embed,
                "pre_norm": timm_model.norm_pre,
                "pooling": pooling,
            },
            class_token=timm_model.cls_token,
            class_position=None if no_position else timm_model.pos_embed[:, 0].detach(),
        )

    def preprocessing(self, model: nn.Module) -> Preprocessing | None:
        """From the configuration that travels with the weights."""
        facts: Any = getattr(model, "pretrained_cfg", None)
        if not facts or "mean" not in facts:
            return None
        height, width = facts["input_size"][-2:]
        crop_share = facts.get("crop_pct") or 1.0
        square = height == width and facts.get("crop_mode", "center") == "center"
        resize = int(height / crop_share) if square else (int(height / crop_share), int(width / crop_share))
        return Preprocessing(
            resize=resize,
            crop=(height, width),
            mean=tuple(facts["mean"]),
            std=tuple(facts["std"]),
            interpolation=facts.get("interpolation") or "bicubic",
            resampler="pillow",
        )

    def library_forward(self, model: nn.Module, images: Tensor) -> Mapping[str, Tensor]:
        """The library's own forward, which our passes must equal."""
        timm_model: Any = model
        outputs = {"tokens": timm_model.forward_features(images)}
        if not isinstance(timm_model.head, nn.Identity):
            outputs["logits"] = model(images)
        return outputs

    def tiny_models(self) -> Mapping[str, Callable[[], nn.Module]]:
        """Small random models of the variants the pretrained ones come in."""
        from timm.layers import SwiGLUPacked
        from timm.models.deit import VisionTransformerDistilled
        from timm.models.vision_transformer import VisionTransformer

        def tiny(cls: Callable[..., nn.Module] = VisionTransformer, **options: Any) -> Callable[[], nn.Module]:
            sizes: dict[str, Any] = {
                "img_size": 32,
                "patch_size": 8,
                "embed_dim": 32,
                "depth": 3,
                "num_heads": 4,
                "mlp_ratio": 2,
                "num_classes": 7,
                "dynamic_img_size": True,
            }
            return lambda: randomised(cls(**{**sizes, **options}))

        return {
            "timm-vit:augreg": tiny(),
            "timm-vit:deit-distilled": tiny(VisionTransformerDistilled),
            "timm-vit:deit3": tiny(no_embed_class=True, init_values=1e-1),
            "timm-vit:dinov2-registers": tiny(
                reg_tokens=3, init_values=1e-1, no_embed_class=True, mlp_layer=SwiGLUPacked
            ),
            "timm-vit:clip": tiny(pre_norm=True, num_classes=0),
            "timm-vit:qk-norm": tiny(qk_norm=True, scale_attn_norm=True, scale_mlp_norm=True),
            "timm-vit:average-pool": tiny(global_pool="avg"),
            "timm-vit:siglip": tiny(class_token=False, global_pool="map"),
        }


FAMILY = TimmViT()
