"""The paper's tables of fidelity, as printed, to stand beside those measured here.

They come from models of the paper's own, with 64k tokens of context: error depends on the model, so compare ratios and
slopes, not values. "No tilt" is the paper's "No Q".
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaperTable:
    number: str
    setting: str
    """what it was measured on, in words"""
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_96M = "96M model, 60 heads, 2 sequences of 64k"
_1B = "1B model, 320 heads, 2 sequences of 64k"

METHODS = PaperTable(
    "Table 1",
    "1B model, 64 heads, 2 sequences of 64k; Q128K128R8SP1B8k, MoBA with one block of 512, blocks of 8k",
    ("attention", "RSE"),
    (("MuSe", "0.006"), ("MoBA", "0.248"), ("block-diagonal", "0.481")),
)
JOINT_1B = PaperTable(
    "Table 2",
    f"{_1B}; R = QK / 16, SP1B8k",
    ("clusters", "RSE", "correlation", "clusters without tilt", "ratio"),
    (
        ("16", "0.03797", "0.9775", "82", "5.1x"),
        ("32", "0.02100", "0.9878", "191", "6.0x"),
        ("64", "0.01139", "0.9935", "568", "8.9x"),
        ("128", "0.00622", "0.9965", "1179", "9.2x"),
        ("256", "0.00330", "0.9980", "2518", "9.8x"),
        ("512", "0.00173", "0.9990", "5481", "10.7x"),
    ),
)
JOINT_1B_NO_TILT = PaperTable(
    "Table 29",
    f"{_1B}; without tilt, R = QK / 16, SP1B8k",
    ("clusters", "RSE", "correlation", "clusters with tilt", "ratio"),
    (
        ("16", "0.0991", "0.9464", "6", "2.7x"),
        ("32", "0.0665", "0.9640", "9", "3.6x"),
        ("64", "0.0428", "0.9775", "13", "4.9x"),
        ("128", "0.0284", "0.9856", "19", "6.7x"),
        ("256", "0.0191", "0.9904", "36", "7.1x"),
        ("512", "0.0129", "0.9935", "57", "9.0x"),
    ),
)
JOINT_96M = PaperTable(
    "Table 15",
    f"{_96M}; R = K / 16, SP1B8k",
    ("clusters", "RSE, no tilt", "RSE", "ratio"),
    (
        ("16", "0.1295", "0.0933", "1.4x"),
        ("32", "0.0943", "0.0640", "1.5x"),
        ("64", "0.0676", "0.0414", "1.6x"),
        ("128", "0.0494", "0.0259", "1.9x"),
        ("256", "0.0365", "0.0152", "2.4x"),
    ),
)
QUERY_CLUSTERS = PaperTable(
    "Table 13",
    f"{_96M}; K128R8SP1B8k",
    ("query clusters", "RSE", "correlation"),
    (
        ("256", "0.0214", "0.9875"),
        ("128", "0.0259", "0.9848"),
        ("64", "0.0301", "0.9825"),
        ("32", "0.0338", "0.9764"),
        ("16", "0.0376", "0.9737"),
        ("no tilt", "0.0494", "0.9685"),
    ),
)
KEY_CLUSTERS = PaperTable(
    "Table 14",
    f"{_96M}; Q128SP1B8k",
    ("key clusters", "retrieved", "RSE", "correlation"),
    (
        ("16", "1", "0.0692", "0.9539"),
        ("32", "2", "0.0504", "0.9639"),
        ("64", "4", "0.0359", "0.9762"),
        ("128", "8", "0.0259", "0.9848"),
        ("256", "16", "0.0180", "0.9882"),
    ),
)
MONOPOLE_96M = PaperTable(
    "Table 16",
    f"{_96M}; B8k, nothing retrieved",
    ("clusters", "RSE, no tilt", "RSE", "ratio"),
    (
        ("32", "0.2362", "0.1273", "1.9x"),
        ("64", "0.2118", "0.1025", "2.1x"),
        ("128", "0.1812", "0.0794", "2.3x"),
        ("256", "0.1560", "0.0586", "2.7x"),
    ),
)
DECOMPOSITION = PaperTable(
    "Table 3",
    "1B model, 64k, B8k",
    ("what is attended to", "RSE, no tilt", "RSE", "ratio"),
    (
        ("summaries, K64", "0.1278", "0.0342", "3.7x"),
        ("summaries, K128", "0.1016", "0.0227", "4.5x"),
        ("summaries, K256", "0.0824", "0.0148", "5.6x"),
        ("retrieved, K128R8", "0.2475", "0.2429", "1.02x"),
    ),
)
RETRIEVAL_ONLY = PaperTable(
    "Table 19",
    f"{_96M}; QK128R8SP1B8k, no summaries attended to",
    ("summaries", "RSE", "correlation"),
    (("tilt", "0.0990", "0.9645"), ("no tilt", "0.1061", "0.9556")),
)
FIXED_RETRIEVAL_96M = PaperTable(
    "Table 17",
    f"{_96M}; R8SP1B8k",
    ("clusters", "keys of opened clusters", "RSE", "correlation"),
    (
        ("64", "8192", "0.0315", "0.9789"),
        ("128", "4096", "0.0259", "0.9848"),
        ("256", "2048", "0.0206", "0.9887"),
        ("512", "1024", "0.0156", "0.9908"),
    ),
)
FIXED_RETRIEVAL_1B = PaperTable(
    "Table 22",
    "1B model, 80 heads, 2 sequences of 64k; R8SP1B8k",
    ("clusters", "keys of opened clusters", "RSE", "correlation"),
    (("64", "8192", "0.00838", "0.9949"), ("128", "4096", "0.00622", "0.9965"), ("256", "2048", "0.00456", "0.9975")),
)
RETRIEVAL_COUNT = PaperTable(
    "Table 18",
    f"{_96M}; QK128SP1B8k",
    ("retrieved", "RSE", "correlation"),
    (("4", "0.0355", "0.9739"), ("8", "0.0259", "0.9848"), ("16", "0.0204", "0.9851")),
)
BLOCK_SIZE = PaperTable(
    "Table 20",
    "1B model, 40 heads, 2 sequences of 64k; QK128R4",
    ("block", "blocks retrieved", "RSE", "correlation"),
    (
        ("16k", "1", "0.00493", "0.9974"),
        ("8k", "2", "0.00704", "0.9959"),
        ("4k", "4", "0.01578", "0.9901"),
        ("2k", "8", "0.03833", "0.9767"),
    ),
)
CLUSTERS_OR_BLOCKS = PaperTable(
    "Table 21",
    "1B model, 40 heads, 64k; QK128B8k",
    ("clusters retrieved", "blocks of each", "RSE", "correlation"),
    (("8", "1", "0.00622", "0.9965"), ("4", "2", "0.00704", "0.9959"), ("2", "4", "0.01797", "0.9892")),
)
DIPOLE = PaperTable(
    "Appendix B",
    "1B model, 64k; QK128B8k",
    ("added", "RSE"),
    (("nothing", "0.0227"), ("shared dipole", "0.0150"), ("8 retrieved", "0.00622")),
)
LENGTH = PaperTable(
    "Table 27",
    "1B model; R = QK / 16, 8 blocks",
    ("length", "clusters", "block", "RSE", "cosine"),
    (
        ("2k", "16", "256", "0.01701", "0.9899"),
        ("4k", "32", "512", "0.00884", "0.9947"),
        ("8k", "32", "1k", "0.01096", "0.9929"),
        ("16k", "64", "2k", "0.00662", "0.9958"),
        ("32k", "64", "4k", "0.00863", "0.9946"),
        ("64k", "128", "8k", "0.00622", "0.9965"),
        ("128k", "128", "16k", "0.00723", "0.9956"),
    ),
)
