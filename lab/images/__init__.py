"""Image data: CIFAR-10, CIFAR-100, Tiny-ImageNet, ImageNet-100, digits, generated images.

sources.py    what to load, and what is known of each source
parquet.py    Parquet files in a folder or on the Hugging Face hub: splits, columns, classes
decode.py     encoded images to one uint8 tensor, or decoded on access if they do not fit in memory
cache.py      that tensor on disk
made.py       digits and generated images, which need no files
select.py     subsets, label noise, mean and deviation
load.py       `load_data(DataSettings(...))`, which does all of this
batches.py    batches of images, in the order of `epochs.py`
"""

from lab.images.batches import Batches
from lab.images.decode import LazyImages
from lab.images.load import ImageData, Split, load_data
from lab.images.sources import SOURCES, DataError, DataSettings

__all__ = [
    "SOURCES",
    "Batches",
    "DataError",
    "DataSettings",
    "ImageData",
    "LazyImages",
    "Split",
    "load_data",
]
