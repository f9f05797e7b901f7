"""Other projects' loaders, for `train bench --peers`, each as its documentation has it.

They must be installed by hand (timm, ffcv, nvidia-dali) and are not needed otherwise. All give full
batches of uint8 or float images with RandomResizedCrop and flip, at full JPEG quality.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from train.contenders import PREFETCH, Contender


def timm_webdataset(contender: Contender) -> Iterable[Any]:
    """Give timm's webdataset reader over our shards, in worker processes."""
    from timm.data import create_dataset, create_loader

    dataset = create_dataset(
        "wds/shards",
        root=str(contender.path),
        split="train",
        is_training=True,
        batch_size=contender.batch_size,
    )
    return create_loader(
        dataset,
        (3, contender.crop_size, contender.crop_size),
        contender.batch_size,
        is_training=True,
        use_prefetcher=False,
        num_workers=contender.num_workers,
        persistent_workers=True,
        auto_augment=None,
        color_jitter=None,
    )


def ffcv(contender: Contender) -> Iterable[Any]:
    """Give FFCV's loader over a file that its writer makes of the raw folder's JPEGs."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    file = Path(tempfile.mkdtemp()) / "train.beton"
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=95), "label": IntField()}
    writer = DatasetWriter(str(file), fields, num_workers=contender.num_workers)
    writer.from_indexed_dataset(ImageFolder(str(contender.path / "train")))
    size = (contender.crop_size, contender.crop_size)
    return Loader(
        str(file),
        batch_size=contender.batch_size,
        num_workers=contender.num_workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=False,
        batches_ahead=PREFETCH,
        pipelines={
            "image": [
                RandomResizedCropRGBImageDecoder(size),
                RandomHorizontalFlip(),
                ToTensor(),
                ToTorchImage(),
            ],
            "label": [IntDecoder(), ToTensor()],
        },
    )


class Dali:
    """DALI's pipeline on the CPU over the raw folder: crop decode, resize and flip in threads."""

    def __init__(self, contender: Contender) -> None:
        from nvidia.dali import fn, pipeline_def, types
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        @pipeline_def
        def pipe() -> Any:
            jpegs, labels = fn.readers.file(
                file_root=str(contender.path / "train"), random_shuffle=True, name="reader"
            )
            images = fn.decoders.image_random_crop(
                jpegs,
                device="cpu",
                output_type=types.RGB,
                random_area=[0.08, 1.0],
                random_aspect_ratio=[3 / 4, 4 / 3],
            )
            size = [contender.crop_size, contender.crop_size]
            images = fn.resize(images, size=size, interp_type=types.INTERP_LINEAR, antialias=True)
            return fn.flip(images, horizontal=fn.random.coin_flip()), labels

        pipeline = pipe(
            batch_size=contender.batch_size,
            num_threads=contender.num_workers,
            device_id=None,
            prefetch_queue_depth=PREFETCH,
        )
        pipeline.build()
        self._iterator = DALIGenericIterator(
            [pipeline],
            ["image", "label"],
            reader_name="reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
            auto_reset=True,
        )

    def __iter__(self) -> Any:
        return ((batch[0]["image"], batch[0]["label"]) for batch in self._iterator)


PEERS = {"timm": timm_webdataset, "ffcv": ffcv, "dali": Dali}
