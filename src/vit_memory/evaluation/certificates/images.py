"""The images of a certificate: drawn by content, or found again by it."""

import hashlib

import torch

from vit_memory.data.images import Images
from vit_memory.data.loading import load_one, nothing_usable
from vit_memory.data.sources import Dataset, open_data
from vit_memory.data.splits import Split
from vit_memory.data.transforms import EvalTransform
from vit_memory.errors import BadImage, DataError
from vit_memory.evaluation.certificates.certificate import (
    CertifiedImage,
    CertifiedImages,
    Request,
)
from vit_memory.preprocessing import Preprocessing


def load_images(
    request: Request, preprocessing: Preprocessing, wanted: CertifiedImages | None, download: bool
) -> tuple[CertifiedImages, torch.Tensor]:
    """The images of a request and their pixels (n, 3, height, width); those that are `wanted`, wherever they are."""
    dataset = open_data(
        request.data,
        data_dir=request.data_dir,
        download=download,
        image_column=request.image_column,
        label_column=request.label_columns,
        kind=request.kind,
        seed=request.seed,
    )
    if request.split not in dataset.splits:
        raise DataError(
            f"{request.data}: has no {request.split} images, but {', '.join(dataset.splits)}: choose with --split."
        )
    chosen = _in_order(dataset.splits[request.split]) if wanted is None else _find(dataset, wanted)
    transform = EvalTransform(preprocessing)
    used: list[CertifiedImage] = []
    pixels: list[torch.Tensor] = []
    bad: list[BadImage] = []
    for split, i in chosen:
        if len(used) == request.images:
            break
        try:
            image = CertifiedImage(split.images.name(i), _sha256(split.images, i))
            pixels.append(load_one(split, i, transform))
        except BadImage as error:
            bad.append(error)
        else:
            used.append(image)
    if not used:
        if wanted is not None and not bad:
            raise DataError(f"{request.data}: holds none of the {len(wanted.used)} images of the certificate.")
        raise nothing_usable("image", bad[0] if bad else None)
    images = CertifiedImages(
        source=dataset.source,
        split=request.split,
        origin=dataset.origin[request.split],
        sha256=hashlib.sha256("".join(image.sha256 for image in used).encode()).hexdigest(),
        used=tuple(used),
        bad=tuple((error.name, error.reason) for error in bad),
    )
    return images, transform.normalised(torch.stack(pixels))


def _in_order(split: Split) -> list[tuple[Split, int]]:
    """All images in the order of their digests: of all classes, and the same whatever their names are."""
    return [(split, i) for i in sorted(range(len(split)), key=split.digests.__getitem__)]


def _find(dataset: Dataset, wanted: CertifiedImages) -> list[tuple[Split, int]]:
    """The images of a certificate that the dataset holds, in any split, in the order of the certificate.

    Digests of splits are the first bytes of an image's SHA-256.
    """
    places: dict[bytes, list[tuple[Split, int]]] = {}
    for split in dataset.splits.values():
        for i, digest in enumerate(split.digests):
            places.setdefault(digest, []).append((split, i))
    pairs = []
    for image in wanted.used:
        same = places.get(bytes.fromhex(image.sha256)[:8], [])
        if same:
            pairs.append(same.pop(0) if len(same) > 1 else same[0])
    return pairs


def _sha256(images: Images, i: int) -> str:
    content = images.read(i)
    return hashlib.sha256(content if isinstance(content, bytes) else content.tobytes()).hexdigest()
