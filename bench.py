#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast is it?  A Markdown table: megatron-core 0.16.1 ("upstream"), our Python, our C.

    python bench.py                   every case, in some minutes; --quick: smaller, in under one
    python bench.py --only blend      the cases whose name or size matches a regular expression
    python bench.py --json FILE       every single time too; "-" is stdout, the table goes to stderr
    pytest bench.py                   the quick sizes in pytest-benchmark, to compare and keep
    torchrun --nproc-per-node 4 bench.py --train
                                      a tiny GPT on several layouts of ranks: equal to one process?

Inputs come from fixed seeds.  All competitors' outcomes are compared first; one that differs gets
no time.  Then each runs once untimed, which warms files and memory, and then they take turns, A B C
A B C ..., so that a slow minute of the machine hits all alike.  Shown are medians.  Files go to a
temporary folder (TMPDIR).  "~": measured on fewer items and scaled up in proportion, as some Python
twins are definitions that would take minutes.  "-": not installed, not built, or no such part.

To add a row, write a case (section 3) and name it in all_cases(); to add a column, see COLUMNS.
"""

import argparse
import atexit
import contextlib
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
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
import torch.distributed
import torch.utils.data
from torch.nn import functional

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
            from megatron.core.utils import get_batch_on_this_cp_rank
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
    module.ParallelGroups = lambda **sizes: None
    module.get_batch_on_this_tp_rank, module.DistributedDataParallel = five_broadcasts, TorchDDP
    module.get_batch_on_this_cp_rank = lambda batch, rank, size: get_batch_on_this_cp_rank(
        dict(batch), types.SimpleNamespace(rank=lambda: rank, size=lambda: size))
    return module


def five_broadcasts(data_iterator, groups, *, micro_batch_size, sequence_length,
                    create_attention_mask=False):
    """How upstream's training script hands a batch to the tp ranks; it is not in the wheel."""
    batch, row = next(data_iterator) if data_iterator else {}, (micro_batch_size, sequence_length)
    layout = {"tokens": (row, torch.int64), "labels": (row, torch.int64),
              "loss_mask": (row, torch.float32), "position_ids": (row, torch.int64)}
    if create_attention_mask:
        layout["attention_mask"] = (row[0], 1, row[1], row[1]), torch.bool
    for key, (shape, dtype) in layout.items():
        batch.setdefault(key, torch.empty(shape, dtype=dtype) if not data_iterator else None)
        torch.distributed.broadcast(batch[key], 0)
    return {"attention_mask": None, **batch}


class TorchDDP(torch.nn.parallel.DistributedDataParallel):
    """torch's, with the names of ours; a single bucket is sent at the end: no overlap."""

    def __init__(self, module, *, bucket_size, overlap_grad_reduce):
        size = 4 * bucket_size / 2**20 if overlap_grad_reduce else 1e6
        super().__init__(module, bucket_cap_mb=size, gradient_as_bucket_view=True)

    zero_grad_buffer = torch.nn.Module.zero_grad

    def finish_grad_sync(self):
        """Backward has waited."""


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
# 2. Two processes
# ==============================================================================
# Some cases need ranks.  Two processes, forked once, run such a case as the parent would, each its
# side of it, and stop where it stops; the parent's clock runs until both have answered.


def on_two_ranks(function):
    """Make of a case one that runs on both ranks of a gloo group; its outcome is both ranks'."""
    @functools.wraps(function)
    def case(mm, n, **sizes):
        ask("start", function.__name__, mm.__name__.removeprefix("megatron_min_"), n, sizes)
        yield
        ask("go")
        yield
        return ask("go")
    return case


@functools.cache
def pair():
    """Start the two processes -> our ends of their pipes."""
    context, ends, store = multiprocessing.get_context("fork"), [], f"file://{home()}/pair"
    for rank in range(2):
        mine, theirs = context.Pipe()
        ends.append(mine)
        context.Process(target=serve, args=(rank, store, theirs, ends), daemon=True).start()
        theirs.close()
    atexit.register(lambda: [end.send(("stop",)) for end in ends])
    return ends


def ask(*request):
    """Have both ranks do something -> their answers."""
    for end in pair():
        end.send(request)
    return [end.recv() for end in pair()]


def serve(rank, store, pipe, others):
    """One of the two processes."""
    for end in others:  # so that it ends when the parent does
        end.close()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", store, rank=rank, world_size=2)
    send, sent = torch.distributed.broadcast, []
    torch.distributed.broadcast = lambda tensor, *arguments, **more: (
        sent.append(tensor.nbytes), send(tensor, *arguments, **more))[1]
    for kind, *request in iter(pipe.recv, ("stop",)):
        answer = sum(sent)
        if kind == "start":
            function, name, n, sizes = request
            steps = globals()[function].__wrapped__(load(name), n, **sizes)
        if kind != "sent":
            sent.clear()
            try:
                answer = next(steps)
            except StopIteration as stop:
                answer = stop.value
        pipe.send(answer)
    torch.distributed.destroy_process_group()


# ==============================================================================
# 3. The cases
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


@functools.cache
def parallel_batch(S, masked):
    """A micro-batch of 8 rows, as a loader gives it."""
    words = torch.from_numpy(np.random.default_rng(SEED).integers(0, EOD, (8, S + 1)))
    batch = {"tokens": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous(),
             "loss_mask": torch.ones(8, S), "position_ids": torch.arange(S).repeat(8, 1)}
    mask = torch.ones(S, S, dtype=torch.bool).triu(1).repeat(8, 1, 1, 1)
    return batch | ({"attention_mask": mask} if masked else {})


@functools.cache
def two_tensor_ranks(mm):
    """The layout tp=2 of the two processes."""
    return mm.ParallelGroups(tensor=2)


def as_arrays(batch):
    """Its tensors, as what travels through a pipe."""
    return {key: value.numpy() for key, value in batch.items() if value is not None}


@on_two_ranks
def tp_batch(mm, n, S, mask):
    """get_batch_on_this_tp_rank: rank 0 has batches, and gives them to rank 1."""
    how = {"micro_batch_size": 8, "sequence_length": S, "create_attention_mask": mask}
    groups, mine = two_tensor_ranks(mm), torch.distributed.get_rank() == 0
    batches = (dict(parallel_batch(S, mask)) for _ in range(n)) if mine else None
    yield
    for _ in range(n):
        batch = mm.get_batch_on_this_tp_rank(batches, groups, **how)
    yield
    return as_arrays(batch)


@on_two_ranks
def cp_batch(mm, n, S, cp):
    """get_batch_on_this_cp_rank: nothing is sent, but upstream wants torch.distributed."""
    batch, rank = parallel_batch(S, False), torch.distributed.get_rank()
    yield
    for _ in range(n):
        part = mm.get_batch_on_this_cp_rank(batch, rank, cp)
    yield
    return as_arrays(part)


@on_two_ranks
def ddp_step(mm, n, parameters, overlap):
    """DistributedDataParallel: forward and backward of 8 layers; upstream stands for torch's."""
    torch.manual_seed(SEED)
    width = math.isqrt(parameters // 8)
    layers = [torch.nn.Linear(width, width, bias=False) for _ in range(8)]
    model = mm.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_size=parameters // 4,
                                       overlap_grad_reduce=overlap)
    inputs = torch.randn(64, width) + torch.distributed.get_rank()

    def step():
        model.zero_grad_buffer()
        model(inputs).square().sum().backward()
        model.finish_grad_sync()

    step()  # torch's settles its buckets in it
    yield
    for _ in range(n):
        step()
    yield
    return [layer.weight.grad.numpy() for layer in layers]


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

    def bytes_a_token(self, name):
        """What a run on two ranks has broadcast."""
        self.milliseconds(name)
        return ask("sent")[0] / (self.items(name) * 8 * self.sizes["S"])

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
          for n, flags in ((reads, "none"), (reads, "resets"), (reads // 62, "dense resets"))),
        *(Case(write, "write a pair", "documents", docs // 10, kind=kind)
          for kind in ("lists", "arrays")),
        Case(merge, "merge two pairs", "documents", docs // 10),
        Case(preprocess, "preprocess", "documents of 2 kB", docs // 100, names=NAMES[1:]),
        *(Case(tp_batch, "parallel, tp batch", "batches of 8", n, S=S, mask=mask)
          for n, S, mask in ((reads // 40, 2048, False), (reads // 100, 512, True))),
        Case(cp_batch, "parallel, cp batch", "batches of 8", reads // 20, S=8192, cp=2),
        *(Case(ddp_step, "parallel, DDP step", "steps", reads // 250, parameters=2**21,
               overlap=overlap) for overlap in (False, True)),
        # Issue 4 goes on here: the loader's thread and workers, the start, --billion.
    ]


# ==============================================================================
# 4. Measuring, and the table
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
    runs, size = {name: times[1:] for name, times in runs.items()}, case.size
    if case.function is tp_batch:
        sent = [f"{case.bytes_a_token(name):.1f}" for name in names]
        size += f"; {' '.join(sent)} bytes a token"
    return {"case": case.title, "size": size, "n": case.n, "twin_n": case.twin_n,
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
    ("size", -66, lambda row: row["size"]),
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
    parser.add_argument("--train", action="store_true", help="train instead; under torchrun or not")
    for name, default, text in (
            ("steps", 10, "steps with each layout"), ("tensor", None, "tp ranks, of the first"),
            ("context", None, "cp ranks, of the second"), ("length", 128, "tokens in a sample"),
            ("width", 64, "of the model"), ("global-batch", 8, "samples a step"),
            ("micro-batch", 2, "samples at once on a rank"), ("rate", 3e-3, "learning rate")):
        parser.add_argument(f"--{name}", type=type(default or 1), default=default,
                            help=f"with --train: {text} ({default or 'default 2, odd worlds 1'})")
    arguments = parser.parse_args(argv)
    if arguments.train:
        return train(arguments)
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
# 5. Training on any layout
# ==============================================================================
# A run that stops and goes on with another layout, four times, against plain training in one
# process, which uses no sampler, no loader, no groups and no DistributedDataParallel.
#
#   tensor parallel     x --AllReduce backward--> some heads, or columns --AllReduce forward--> + x
#   context parallel    keys and values of all tokens, but queries of this rank's alone


class AllReduce(torch.autograd.Function):
    """The sum over a group, of what goes forward or of the gradient that comes back."""

    @staticmethod
    def forward(ctx, x, group, now):
        """x, summed now or later."""
        ctx.group, ctx.now = group, now
        return total(x, group) if now else x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """The other way round."""
        return grad if ctx.now else total(grad, ctx.group), None, None


def total(x, group):
    """The sum of x over a group, as a new tensor; None is a group of one."""
    x = x.clone(memory_format=torch.contiguous_format)
    if group is not None:
        torch.distributed.all_reduce(x, group=group)
    return x


def gathered(x, groups, kind, axis):
    """The parts of all ranks of a group, one after the other, with a gradient."""
    parts = [torch.zeros_like(x)] * groups.size(kind)
    parts[groups.rank(kind)] = x
    whole = AllReduce.apply(torch.cat(parts, axis), groups.group(kind), True)
    return AllReduce.apply(whole, groups.group(kind), False)


class GPT(torch.nn.Module):
    """As plain as can be; a tp rank holds some of the heads and of the MLP's columns.

    In float64: the order of sums differs between layouts, and AdamW makes steps of noise.
    """

    AXES = {"qkv": 1, "out": 0, "up": 1, "down": 0}  # which the tp ranks share

    def __init__(self, groups, length, width, layers=2, heads=4, vocabulary=257):
        super().__init__()
        shapes = {"embed": (vocabulary, width), "place": (length, width)}
        for i in range(layers):
            shapes |= {f"qkv{i}": (3, heads, width // heads, width),
                       f"out{i}": (heads, width // heads, width),
                       f"up{i}": (width, 4 * width), f"down{i}": (4 * width, width)}
        random = torch.Generator().manual_seed(SEED)
        self.groups, self.layers = groups, layers
        self.weights = torch.nn.ParameterDict({
            name: self.mine(name, 0.02 * torch.randn(shape, generator=random, dtype=torch.float64))
            for name, shape in shapes.items()})

    def forward(self, tokens, places):
        """Tokens and their places in the sample -> logits."""
        w, groups = self.weights, self.groups
        norm = lambda x: functional.layer_norm(x, x.shape[-1:])  # noqa: E731
        enter, leave = (lambda x, now=now: AllReduce.apply(x, groups.group("tp"), now)
                        for now in (False, True))
        mask = gathered(places, groups, "cp", 1)[:, None, None, :] <= places[:, None, :, None]
        x = w["embed"][tokens] + w["place"][places]
        for i in range(self.layers):
            qkv = torch.einsum("bsw,chdw->cbhsd", enter(norm(x)), w[f"qkv{i}"])
            keys, values = gathered(qkv[1:], groups, "cp", 3)
            seen = functional.scaled_dot_product_attention(qkv[0], keys, values, mask)
            x = x + leave(torch.einsum("bhsd,hdw->bsw", seen, w[f"out{i}"]))
            x = x + leave(functional.gelu(enter(norm(x)) @ w[f"up{i}"]) @ w[f"down{i}"])
        return norm(x) @ w["embed"].T

    def mine(self, name, whole):
        """This tp rank's part of a weight, or of what the optimizer has for it."""
        axis = self.AXES.get(name.rstrip("0123456789"))
        if axis is None or not whole.ndim:
            return whole.clone()
        return whole.chunk(self.groups.size("tp"), axis)[self.groups.rank("tp")].clone()

    def whole(self, name, mine):
        """The same, put together."""
        axis = self.AXES.get(name.rstrip("0123456789"))
        return mine if axis is None or not mine.ndim else gathered(mine, self.groups, "tp", axis)


def summed_loss(model, batch):
    """The loss, summed over the tokens that count."""
    logits = model(batch["tokens"], batch["position_ids"])
    losses = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(),
                                      reduction="none")
    return (losses * batch["loss_mask"].flatten()).sum()


def global_batch(seen, groups):
    """All ranks' tokens of a step, in the order of the samples: (samples, S)."""
    mine = torch.stack([torch.stack([batch["tokens"], batch["position_ids"]]) for batch in seen])
    parts = [mine] * groups.size("dp-cp")
    if groups.group("dp-cp") is not None:
        parts = [torch.empty_like(mine) for _ in parts]
        torch.distributed.all_gather(parts, mine, group=groups.group("dp-cp"))
    parts = torch.stack(parts).unflatten(0, (groups.size("dp"), -1))  # dp cp micro 2 rows tokens
    tokens, places = parts.permute(3, 2, 0, 4, 1, 5).flatten(4).flatten(1, 3)
    return tokens.gather(1, places.argsort(1))


def is_first():
    """Is this the only process, or rank 0?"""
    return os.environ.get("RANK", "0") == "0"


def report(step, layout, loss, seconds, options):
    """The line of a step."""
    rate = options.global_batch * options.length / seconds
    print(f"step {step:3}  {layout:14} loss {loss:.4f} {rate:9,.0f} tokens/s", flush=True)


def train_in_one_process(mm, dataset, options, steps):
    """What must come out -> losses, batches of tokens."""
    model, losses, batches = GPT(mm.ParallelGroups(), options.length, options.width), [], []
    optimizer = torch.optim.AdamW(model.parameters(), options.rate)
    for step in range(steps):
        start, first = time.perf_counter(), step * options.global_batch
        batch = torch.utils.data.default_collate(
            [dataset[i] for i in range(first, first + options.global_batch)])
        loss = summed_loss(model, batch) / batch["loss_mask"].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        batches.append(batch["tokens"])
        if (step + 1) % options.steps == 0:
            report(step, "one process", losses[-1], time.perf_counter() - start, options)
    return losses, batches


def train_layout(mm, dataset, options, steps, groups, checkpoint):
    """Resume from a checkpoint if there is one, train, leave another -> losses, batches."""
    sizes = {"micro_batch_size": options.micro_batch, "sequence_length": options.length}
    ranks = {"data_parallel_rank": groups.rank("dp"), "data_parallel_size": groups.size("dp")}
    count = mm.NumMicroBatches(options.global_batch, options.micro_batch, groups.size("dp")).get()
    gpt, losses, batches, lead = GPT(groups, options.length, options.width), [], [], is_first()
    optimizer = torch.optim.AdamW(gpt.parameters(), options.rate)
    loader = mm.build_pretraining_data_loader(dataset, 0, micro_batch_size=options.micro_batch,
                                              **ranks)
    if steps[0]:
        load_checkpoint(gpt, optimizer, loader, checkpoint)
    model = mm.DistributedDataParallel(gpt, groups.group("dp-cp"), bucket_size=10_000,
                                       overlap_grad_reduce=True)
    batch_iterator = iter(loader) if groups.rank("tp") == 0 else None

    def forward_step(iterator, model):
        seen.append(mm.get_batch(iterator, groups, **sizes))
        return summed_loss(model, seen[-1]), lambda loss: (
            loss, seen[-1]["loss_mask"].sum(), loss.detach())

    for step in steps:
        start, seen = time.perf_counter(), []
        reports = mm.forward_backward_no_pipelining(
            forward_step_func=forward_step, data_iterator=batch_iterator, model=model,
            num_microbatches=count)
        optimizer.step()
        model.zero_grad_buffer()
        sums = torch.stack([sum(reports), sum(batch["loss_mask"].sum() for batch in seen)])
        loss, tokens = total(sums, groups.group("dp-cp")).tolist()
        losses.append(loss / tokens)
        seconds = time.perf_counter() - start
        batches.append(global_batch(seen, groups))
        if lead and (step == steps[0] or step == steps[-1] or step % 5 == 0):
            report(step, layout_name(groups), losses[-1], seconds, options)
    save_checkpoint(gpt, optimizer, loader, checkpoint)
    return losses, batches


def layout_name(groups):
    """Such as "dp=2 tp=2"."""
    sizes = {kind: groups.size(kind) for kind in ("dp", "tp", "cp")}
    return " ".join(f"{kind}={size}" for kind, size in sizes.items() if size > 1) or "dp=1"


@torch.no_grad()
def save_checkpoint(gpt, optimizer, loader, path):
    """Write whole tensors, which fit every layout, and where the loader is; return when written."""
    moments = {name: {key: gpt.whole(name, value) for key, value in optimizer.state[param].items()}
               for name, param in gpt.weights.items()}
    weights = {name: gpt.whole(name, param.data) for name, param in gpt.weights.items()}
    if is_first():
        torch.save({"weights": weights, "moments": moments, "loader": loader.state_dict()}, path)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


@torch.no_grad()
def load_checkpoint(gpt, optimizer, loader, path):
    """Take this rank's part of everything."""
    state = torch.load(path)
    loader.load_state_dict(state["loader"])
    for name, param in gpt.weights.items():
        param.copy_(gpt.mine(name, state["weights"][name]))
        optimizer.state[param] = {key: gpt.mine(name, value)
                                  for key, value in state["moments"][name].items()}


def demo_blend(mm, folder, samples, length):
    """The blend of the pairs that the demo has left in a folder, to train on."""
    prefixes = sorted(str(path)[:-4] for path in Path(folder).glob("*_document.idx"))
    config = mm.GPTDatasetConfig(SEED, length, (prefixes, [70, 30]), split="90,5,5",
                                 tokenizer=mm.ByteTokenizer(), create_attention_mask=False,
                                 path_to_cache=f"{folder}/cache")
    sizes = [samples, 0, 0]
    return mm.BlendedMegatronDatasetBuilder(mm.GPTDataset, sizes, lambda: True, config).build()[0]


def train(options):
    """Train with each layout in turn, print what came out -> 0, or 1 if not equal."""
    mm, world = load("C") or load("Python"), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    tensor, context = (given or 2 - world % 2 for given in (options.tensor, options.context))
    layouts = [(tensor, 1), (1, context), (1, 1)]
    layouts += [(tensor, context)] * (world % (tensor * context) == 0)
    steps = options.steps * len(layouts)
    shared = [None] * 2
    if is_first():  # the others wait for it in the next collective
        mm.main(["demo", "--keep", home()])
        print()
        dataset = demo_blend(mm, home(), steps * options.global_batch, options.length)
        shared = home(), train_in_one_process(mm, dataset, options, steps)
    if world > 1:
        torch.distributed.init_process_group("gloo")
        shared = list(shared)
        torch.distributed.broadcast_object_list(shared)
    folder, wanted = shared
    dataset = demo_blend(mm, folder, steps * options.global_batch, options.length)
    rows = []
    for number, (tensor, context) in enumerate(layouts):
        groups = mm.ParallelGroups(tensor=tensor, context=context)
        part = range(number * options.steps, (number + 1) * options.steps)
        found = train_layout(mm, dataset, options, part, groups, f"{folder}/checkpoint.pt")
        off = np.abs(np.subtract(found[0], wanted[0][part[0]:part[-1] + 1])).max()
        good = off < 1e-6 and all(map(torch.equal, found[1], wanted[1][part[0]:]))
        good = total(torch.tensor(int(good)), None if world == 1 else torch.distributed.group.WORLD)
        rows.append((layout_name(groups), part, found[0][-1], off, good.item() == world))
    equal = all(good for *_, good in rows)
    if is_first():
        print("\n| layout         |   steps | loss   | off by, at most | equal to one process |\n"
              "| -------------- | ------: | -----: | --------------: | -------------------- |")
        for name, part, loss, off, good in rows:
            print(f"| {name:14} | {f'{part[0]}-{part[-1]}':>7} | {loss:.4f} | {off:15.1e} | "
                  f"{good!s:20} |")
        print(f"\nlosses and batches equal to one process: {equal}")
    if world > 1:
        torch.distributed.destroy_process_group()
    return int(not equal)


# ==============================================================================
# 6. The same under pytest-benchmark
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
