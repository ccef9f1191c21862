#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast is it?  A Markdown table: megatron-core 0.16.1 ("upstream"), our Python, our C.

    python bench.py                   every case, in some minutes; --quick: smaller, in under one
    python bench.py --only blend      the cases whose name or size matches a regular expression
    python bench.py --json FILE       every single time too; "-" is stdout, the table goes to stderr
    pytest bench.py                   the quick sizes in pytest-benchmark, to compare and keep

Inputs come from fixed seeds.  All competitors' outcomes are compared first; one that differs gets
no time.  Then each runs once untimed, which warms files and memory, and then they take turns, A B C
A B C ..., so that a slow minute of the machine hits all alike.  Shown are medians.  Files go to a
temporary folder (TMPDIR).  "~": measured on fewer items and scaled up in proportion, as some Python
twins are definitions that would take minutes.  "-": not installed, not built, or no such part.

To add a row, write a case (section 2) and name it in all_cases(); to add a column, see COLUMNS.
"""

import argparse
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import os
import platform
import re
import shutil
import statistics
import struct
import sys
import tempfile
import time
import types
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.utils.data

NAMES = ("upstream", "Python", "C")
SEED, EOD = 1234, 50256

# ==============================================================================
# 1. The competitors, and their files
# ==============================================================================
# Each is a module with upstream's public names, so that a case runs the same lines on all three.


@functools.cache
def load(name):
    """One of NAMES -> its module (ours: a private copy), or None where it is missing."""
    if name == "upstream":
        return load_upstream()
    source = Path(__file__).resolve().parent / "megatron_min.py"
    spec = importlib.util.spec_from_file_location(f"megatron_min_{name}", source)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ, MEGATRON_MIN_C="1" if name == "C" else "0"):
        try:
            spec.loader.exec_module(module)
        except ImportError:
            return None
    return module


def load_upstream():
    """The data path of megatron-core, and what it leaves to numpy or to scripts."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset, utils
    except ImportError:
        return None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    module = types.ModuleType("upstream")
    for source in (utils, helpers, indexed_dataset, gpt_dataset):
        vars(module).update((key, value) for key, value in vars(source).items() if key[0] != "_")

    def merge(prefixes, output_prefix):
        """What tools/merge_datasets.py does, which is not in the wheel."""
        dtype = indexed_dataset.IndexedDataset(prefixes[0]).index.dtype
        builder = indexed_dataset.IndexedDatasetBuilder(f"{output_prefix}.bin", dtype)
        for prefix in prefixes:
            builder.add_index(prefix)
        builder.finalize(f"{output_prefix}.idx")

    module.merge, module.shuffle = merge, lambda items, random_state: random_state.shuffle(items)
    module.build_pretraining_data_loader = lambda dataset, consumed_samples, micro_batch_size: (
        torch.utils.data.DataLoader(dataset, micro_batch_size, drop_last=True))
    return module


class Tokenizer:
    """As much of a tokenizer as a dataset asks for."""

    vocab_size, eod = EOD + 1, EOD
    unique_identifiers = {"class": "bench.Tokenizer"}


@functools.cache
def home():
    """A temporary folder that lives as long as the process."""
    home.keep = tempfile.TemporaryDirectory(prefix="megatron-min-bench-")
    return home.keep.name


def fresh_folder():
    """The folder that a single run writes to, empty again."""
    path = os.path.join(home(), "fresh")
    shutil.rmtree(path, ignore_errors=True)
    os.mkdir(path)
    return path


def written_files():
    """name -> bytes of what the last run left in its folder; the manifest is ours alone."""
    return {path.name: path.read_bytes() for path in Path(home(), "fresh").iterdir()
            if not path.name.endswith("-manifest.json")}


@functools.lru_cache(maxsize=2)
def lengths_of(documents):
    """Tokens in each document, int32: 1 to 999, 500 in the mean."""
    return np.random.default_rng(SEED).integers(1, 1000, documents, dtype=np.int32)


@functools.cache
def corpus(documents, seed=SEED):
    """Write a pair of random uint16 tokens -> its prefix.  Without a seed .bin is one big hole."""
    prefix, lengths = os.path.join(home(), f"corpus-{documents}-{seed}"), lengths_of(documents)
    ends = np.cumsum(lengths, dtype=np.int64)
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * int(ends[-1]))
        if seed is not None:
            tokens = np.random.default_rng(seed).integers(0, EOD, ends[-1], dtype=np.uint16)
            tokens[ends - 1] = EOD
            tokens.tofile(file)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        lengths.tofile(file)
        (2 * (ends - lengths)).tofile(file)
        np.arange(documents + 1, dtype=np.int64).tofile(file)
    return prefix


FLAGS = {  # what a dataset may be asked for, by the name that the table shows
    "none": {},
    "fast_cache_load": {"fast_cache_load": True},
    "resets": {"reset_position_ids": True, "eod_mask_loss": True},
    "dense resets": {"reset_position_ids": True, "eod_mask_loss": True,
                     "reset_attention_mask": True, "create_attention_mask": True},
}


def gpt_dataset(mm, prefix, length, cache, flags="none"):
    """One epoch of a whole corpus as a GPTDataset; without a dense mask, if not asked for."""
    given = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
             "create_attention_mask": False} | FLAGS[flags]
    config = mm.GPTDatasetConfig(SEED, length, blend_per_split=[([prefix], None), None, None],
                                 path_to_cache=cache, tokenizer=Tokenizer(), **given)
    low = mm.IndexedDataset(prefix)
    indices = np.arange(len(low), dtype=np.int32)
    return mm.GPTDataset(low, prefix, indices, None, mm.Split.train, config)


@functools.lru_cache(maxsize=3)
def opened(mm, documents, length, flags):
    """A dataset to read from; all competitors share one cache, which the first of them writes."""
    cache = os.path.join(home(), "cache")
    return gpt_dataset(mm, corpus(documents), length, cache, flags)


# ==============================================================================
# 2. The cases
# ==============================================================================
# A case is a function of a competitor and of sizes, n of some item first, that stops three times:
#
#     def case(mm, n):
#         ...          untimed: inputs, an empty folder, an open file
#         yield
#         ...          timed
#         yield
#         return ...   what must be equal: arrays, tensors, bytes; nested as one likes


def sample_index(mm, n, S):
    """build_sample_idx: one epoch of documents in random order."""
    sizes, order = lengths_of(n), np.random.default_rng(SEED).permutation(n).astype(np.int32)
    tokens = int(sizes.sum(dtype=np.int64))
    yield
    index = mm.build_sample_idx(sizes, order, S, 1, tokens)
    yield
    return index


def shuffle(mm, n):
    """shuffle; upstream and the twin call numpy.random.RandomState.shuffle."""
    items, random_state = np.arange(n, dtype=np.int32), np.random.RandomState(SEED)
    yield
    mm.shuffle(items, random_state)
    yield
    return items, random_state.get_state()


def blend(mm, n, datasets, weights):
    """build_blending_indices; weights uniform at random, equal, or 1/k for the k-th dataset."""
    shares = shares_of(datasets, weights)
    which, sample = np.zeros(n, np.int16), np.zeros(n, np.int64)
    yield
    mm.build_blending_indices(which, sample, shares, datasets, n, False)
    yield
    return which, sample


def exhaustive_blend(mm, n, datasets, weights):
    """build_exhaustive_blending_indices; n samples in all, at least one of each dataset."""
    counts = 1 + (shares_of(datasets, weights) * (n - datasets)).astype(np.int64)
    counts[0] += n - counts.sum()
    which, sample = np.zeros(n, np.int16), np.zeros(n, np.int64)
    yield
    mm.build_exhaustive_blending_indices(which, sample, counts, datasets)
    yield
    return which, sample


def shares_of(datasets, weights):
    """Normalized weights, float64."""
    shares = {"random": np.random.default_rng(SEED).random(datasets), "equal": np.ones(datasets),
              "1/k": 1 / np.arange(1, datasets + 1)}[weights]
    return shares / shares.sum()


def build(mm, n, S):
    """GPTDataset of one epoch, with its cache written to an empty folder."""
    prefix, cache = corpus(n, None), fresh_folder()
    yield
    ds = gpt_dataset(mm, prefix, S, cache)
    yield
    return ds.document_index[:], ds.sample_index[:], ds.shuffle_index[:], written_files()


def cache_hit(mm, n, S, flags):
    """GPTDataset with its cache there: all open one and the same, which our Python has written."""
    prefix, cache = corpus(n, None), os.path.join(home(), "hit")
    gpt_dataset(load("Python"), prefix, S, cache, "fast_cache_load")
    yield
    ds = gpt_dataset(mm, prefix, S, cache, flags)
    yield
    return ds.document_index[:], ds.sample_index[:], ds.shuffle_index[:]


def samples(mm, n, S, flags):
    """dataset[i] in order, which reads all over a file of 100,000 documents."""
    ds = opened(mm, 100_000, S, flags)
    yield
    for i in range(n):
        ds[i]
    yield
    return [ds[i] for i in range(min(n, 64))]


def batches(mm, n, S, flags):
    """The DataLoader, micro-batches of 8, no workers."""
    ds = opened(mm, 100_000, S, flags)
    loader = mm.build_pretraining_data_loader(ds, 0, micro_batch_size=8)
    yield
    for _ in itertools.islice(loader, n // 8):
        pass
    yield
    return list(itertools.islice(mm.build_pretraining_data_loader(ds, 0, micro_batch_size=8), 4))


def write(mm, n, kind):
    """add_document and finalize, of documents as lists (what tokenizers give) or int32 arrays."""
    rng, prefix = np.random.default_rng(SEED), os.path.join(fresh_folder(), "pair")
    few = [rng.integers(0, EOD, length, dtype=np.int32) for length in lengths_of(1000)]
    few = [tokens.tolist() for tokens in few] if kind == "lists" else few
    yield
    builder = mm.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for tokens in itertools.islice(itertools.cycle(few), n):
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    yield
    return written_files()


def merge(mm, n):
    """merge of two pairs of n / 2 documents each."""
    inputs = [corpus(n // 2, seed) for seed in (1, 2)]
    output = os.path.join(fresh_folder(), "pair")
    yield
    mm.merge(inputs, output)
    yield
    return written_files()


def preprocess(mm, n):
    """preprocess with the byte tokenizer and one process; upstream's is a script, no function."""
    path, output = os.path.join(home(), f"text-{n}.jsonl"), os.path.join(fresh_folder(), "pair")
    if not os.path.exists(path):
        words = np.random.default_rng(SEED).choice("the of and to in is that it".split(), (n, 1000))
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": " ".join(row)[:2000]}) + "\n" for row in words)
    yield
    mm.preprocess([path], output, append_eod=True)
    yield
    return written_files()


class Case:
    """A row: a function above, its name, what its n items are, and its other sizes.

    twin_n   items for the Python twin, where it is far slower than the others
    """

    def __init__(self, function, title, unit, n, twin_n=None, names=NAMES, **sizes):
        self.function, self.title, self.names = function, title, names
        self.n, self.twin_n, self.sizes = n, twin_n or n, sizes
        self.size = ", ".join([f"{n:,} {unit}", *(f"{key}={sizes[key]}" for key in sizes)])

    def items(self, name):
        """How many items this competitor is given."""
        return self.twin_n if name == "Python" else self.n

    def start(self, name, n=None):
        """The case up to where the clock starts."""
        steps = self.function(load(name), n or self.items(name), **self.sizes)
        next(steps)
        return steps

    def milliseconds(self, name):
        """One timed run, scaled to n items."""
        steps = self.start(name)
        start = time.perf_counter()
        next(steps)
        return 1e3 * (time.perf_counter() - start) * self.n / self.items(name)

    def outcome(self, name, n):
        """What a run of n items gives."""
        steps = self.start(name, n)
        next(steps)
        try:
            next(steps)
        except StopIteration as stop:
            return stop.value

    def different(self, names):
        """The names whose outcome is not that of the first, compared at the size that both run."""
        wanted = functools.cache(functools.partial(self.outcome, names[0]))
        sizes = {name: min(self.items(name), self.items(names[0])) for name in names[1:]}
        return [name for name, n in sizes.items() if not same(wanted(n), self.outcome(name, n))]


def all_cases(quick):
    """The rows of the table, from top to bottom."""
    big, drawn, reads = (10**6, 10**5, 1_000) if quick else (10**7, 10**6, 4_000)
    docs, twin = (10**5, 2_000) if quick else (10**6, 10_000)
    mixed = functools.partial(Case, unit="samples", n=drawn, twin_n=twin)
    return [
        *(Case(sample_index, "sample index", "documents", big, S=S) for S in (128, 2048, 8192)),
        Case(shuffle, "shuffle", "int32", big),
        *(mixed(blend, "blend", datasets=count, weights="random")
          for count in (2, 4, 16, 64, 256, 1024, 4096)),
        *(mixed(blend, "blend", datasets=256, weights=weights) for weights in ("equal", "1/k")),
        *(mixed(exhaustive_blend, "exhaustive blend", datasets=count, weights="random")
          for count in (16, 1024)),
        Case(build, "GPTDataset, new cache", "documents", docs, S=2048),
        *(Case(cache_hit, "GPTDataset, cache hit", "documents", docs, S=2048, flags=flags)
          for flags in ("none", "fast_cache_load")),
        *(Case(samples, "dataset[i]", "samples", reads, S=S, flags="none")
          for S in (512, 2048, 8192)),
        *(Case(batches, "DataLoader", "samples", n, S=2048, flags=flags)
          for n, flags in ((reads, "none"), (reads, "resets"), (32, "dense resets"))),
        *(Case(write, "write a pair", "documents", docs // 10, kind=kind)
          for kind in ("lists", "arrays")),
        Case(merge, "merge two pairs", "documents", docs // 10),
        Case(preprocess, "preprocess", "documents of 2 kB", docs // 100, names=NAMES[1:]),
        # Issue 4 goes on here: the loader's thread and workers, the start, --billion.
    ]


# ==============================================================================
# 3. Measuring, and the table
# ==============================================================================


def same(a, b):
    """Equal in every value, dtype and shape, in nested lists and dicts too."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, (np.ndarray, torch.Tensor)):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


def measure(case, rounds, seconds):
    """-> the row of a case: so many rounds, and more, up to 50, until the seconds are over."""
    names = [name for name in case.names if load(name)]
    differs = case.different(names)
    runs = {name: [] for name in names if name not in differs}
    gc.collect()
    start = time.perf_counter()
    for number in range(51):  # number 0 warms up
        for name, times in runs.items():
            times.append(case.milliseconds(name))
        if number >= rounds and time.perf_counter() - start > seconds:
            break
    runs = {name: times[1:] for name, times in runs.items()}
    return {"case": case.title, "size": case.size, "n": case.n, "twin_n": case.twin_n,
            "differs": differs, "runs_ms": runs,
            "median_ms": {name: statistics.median(times) for name, times in runs.items()}}


def milliseconds(row, name):
    """A cell: the median of one competitor."""
    if name not in row["median_ms"]:
        return "differs" if name in row["differs"] else "-"
    median, scaled = row["median_ms"][name], name == "Python" and row["twin_n"] < row["n"]
    return f"{'~' * scaled}{median:,.{2 if median < 10 else 1 if median < 1000 else 0}f}"


def ratio(row, name, other):
    """A cell: how many times faster name is than other."""
    medians = row["median_ms"]
    if name not in medians or other not in medians:
        return "-"
    times = medians[other] / medians[name]
    return f"{times:,.{2 if times < 10 else 1 if times < 100 else 0}f}x"


def rate(row):
    """A cell: items that our fastest does in a second."""
    medians = [row["median_ms"][name] for name in NAMES[1:] if name in row["median_ms"]]
    return f"{1e3 * row['n'] / min(medians):,.0f}" if medians else "-"


#: title, width (negative: to the left), row -> text.  Issue 4 adds "against memcpy".
COLUMNS = [
    ("case", -21, lambda row: row["case"]),
    ("size", -50, lambda row: row["size"]),
    ("upstream ms", 11, lambda row: milliseconds(row, "upstream")),
    ("Python ms", 9, lambda row: milliseconds(row, "Python")),
    ("C ms", 7, lambda row: milliseconds(row, "C")),
    ("C against upstream", 18, lambda row: ratio(row, "C", "upstream")),
    ("C against Python", 16, lambda row: ratio(row, "C", "Python")),
    ("ours, items/s", 13, rate),
]


def line(cells):
    """A line of the table, padded so that it reads well as text too."""
    padded = [cell.ljust(-width) if width < 0 else cell.rjust(width)
              for cell, (_, width, _) in zip(cells, COLUMNS)]
    return f"| {' | '.join(padded)} |"


def machine():
    """What the numbers depend on, as a dict of strings."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((text.split(": ")[1] for text in lines if text.startswith("model name")), cpu)
    upstream = importlib.metadata.version("megatron-core") if load("upstream") else "not installed"
    return {"machine": f"{cpu}, {os.cpu_count()} cores", "Python": platform.python_version(),
            "numpy": np.__version__, "torch": torch.__version__, "upstream": upstream,
            "megatron-min": load("Python").__version__,
            "kernels": "Python and C" if load("C") else "Python (C is not built)",
            "date": str(datetime.date.today())}


def main(argv=None):
    """Print the table -> 0, or 1 if a competitor differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, in under a minute")
    parser.add_argument("--rounds", type=int, help="timed runs, at least (default 5; quick: 3)")
    parser.add_argument("--only", default="", metavar="REGEX", help="search in case and size")
    parser.add_argument("--json", metavar="FILE", help="every time as JSON; -: on stdout")
    arguments = parser.parse_args(argv)
    rounds, seconds = (3, 0.1) if arguments.quick else (5, 2)
    rounds = arguments.rounds or rounds
    out = sys.stderr if arguments.json == "-" else sys.stdout
    show, head, rows = functools.partial(print, file=out, flush=True), machine(), []
    show("; ".join(f"{key} {value}" for key, value in head.items()), end="; ")
    show(f"medians of {rounds} rounds or more\n")
    show(line([title for title, _, _ in COLUMNS]))
    show(line(["-" * -width if width < 0 else "-" * (width - 1) + ":" for _, width, _ in COLUMNS]))
    for case in all_cases(arguments.quick):
        if re.search(arguments.only, f"{case.title} {case.size}"):
            rows.append(measure(case, rounds, seconds))
            show(line([text(rows[-1]) for _, _, text in COLUMNS]))
    if arguments.json:
        text = json.dumps({**head, "rows": rows}, indent=1) + "\n"
        print(text, end="") if arguments.json == "-" else Path(arguments.json).write_text(text)
    return int(any(row["differs"] for row in rows))


# ==============================================================================
# 4. The same under pytest-benchmark
# ==============================================================================


def pytest_generate_tests(metafunc):
    """One test for each case and each competitor that is there."""
    pairs = [(case, name) for case in all_cases(quick=True) for name in case.names if load(name)]
    ids = [f"{case.title}, {case.size}, {name}" for case, name in pairs]
    metafunc.parametrize("case, name", pairs, ids=ids)


def test_case(case, name, benchmark):
    """Equal to the first competitor that is there; then timed, in a group for each case."""
    first = next(other for other in case.names if load(other))
    assert not case.different([first, name])
    benchmark.group = f"{case.title}, {case.size}"
    benchmark.extra_info["items"] = case.items(name)
    benchmark.pedantic(next, setup=lambda: ((case.start(name),), {}), rounds=5, warmup_rounds=1)


if __name__ == "__main__":
    sys.exit(main())
