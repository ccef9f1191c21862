#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast is it?  A Markdown table: megatron-core 0.16.1 ("upstream"), our Python, our C.

    python bench.py                   every case, in some minutes; --quick: smaller, in under one
    python bench.py --billion         cost against size, up to a billion documents: table and plot
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
"(...)": not upstream's, but of the peer that the size names; it does less, and only tokenizers' ids
are compared.  Several numbers in a size are those of upstream, Python and C.  "C / memcpy": how
much longer than numpy's copy of the result, of the memory or of the file that it is.

To add a row, write a case (section 3) and name it in all_cases(); to add a column, see COLUMNS.
"""

import argparse
import atexit
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
import subprocess
import sys
import tempfile
import threading
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
    """One of NAMES -> its module (ours: a private copy), or None where it is missing; a peer ->
    the package that it needs."""
    if name in PEERS:
        package = PEERS[name][0]
        return importlib.util.find_spec(package) and importlib.import_module(package)
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
            from megatron.core.datasets import blended_megatron_dataset_builder as builder
            from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset, utils
            from megatron.core.utils import get_batch_on_this_cp_rank
    except ImportError:
        return None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    module = types.ModuleType("upstream")
    for source in (utils, helpers, indexed_dataset, gpt_dataset, builder):
        vars(module).update((key, value) for key, value in vars(source).items() if key[0] != "_")

    def merge(prefixes, output_prefix):
        """What tools/merge_datasets.py does, which is not in the wheel."""
        dtype = indexed_dataset.IndexedDataset(prefixes[0]).index.dtype
        pair = indexed_dataset.IndexedDatasetBuilder(f"{output_prefix}.bin", dtype)
        for prefix in prefixes:
            pair.add_index(prefix)
        pair.finalize(f"{output_prefix}.idx")

    module.merge, module.shuffle = merge, lambda items, random_state: random_state.shuffle(items)
    module.build_pretraining_data_loader = lambda dataset, consumed_samples, **sizes: (
        torch.utils.data.DataLoader(dataset, sizes.pop("micro_batch_size"), **sizes))
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
    """Write a pair of random uint16 tokens -> its prefix.  Without a seed .bin is one big hole.

    The lengths repeat after a million, so that a billion documents need little memory here.
    """
    prefix = os.path.join(home(), f"corpus-{documents}-{seed}")
    lengths = lengths_of(min(documents, 10**6))
    ends = np.cumsum(lengths, dtype=np.int64)
    firsts = range(0, documents, len(lengths))
    parts = [(first, min(len(lengths), documents - first)) for first in firsts]
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        for _, count in parts:
            lengths[:count].tofile(file)
        for first, count in parts:
            (2 * (ends - lengths + first // len(lengths) * ends[-1]))[:count].tofile(file)
        for first, count in parts:
            np.arange(first, first + count, dtype=np.int64).tofile(file)
        file.write(struct.pack("<q", documents))
    first, count = parts[-1]
    with open(f"{prefix}.bin", "wb") as file:
        file.truncate(2 * (first // len(lengths) * int(ends[-1]) + int(ends[count - 1])))
        if seed is not None:
            tokens = np.random.default_rng(seed).integers(0, EOD, ends[-1], dtype=np.uint16)
            tokens[ends - 1] = EOD
            tokens.tofile(file)
    return prefix


FLAGS = {  # what a dataset may be asked for, by the name that the table shows
    "none": {},
    "fast_cache_load": {"fast_cache_load": True},
    "resets": {"reset_position_ids": True, "eod_mask_loss": True},
    "cu_seqlens, upstream: resets": {"reset_position_ids": True, "eod_mask_loss": True,
                                     "inter_document_masking": True},
    "dense resets": {"reset_position_ids": True, "eod_mask_loss": True,
                     "reset_attention_mask": True, "create_attention_mask": True},
    "verify_reads": {"verify_reads": True},
}


def config_of(mm, prefixes, length, cache, flags="none", **more):
    """All of some corpora to train on; without a dense mask, and what upstream 0.16.1 lacks."""
    given = {"reset_position_ids": False, "reset_attention_mask": False, "eod_mask_loss": False,
             "create_attention_mask": False, **FLAGS[flags], **more}
    given = {key: value for key, value in given.items() if hasattr(mm.GPTDatasetConfig, key)}
    return mm.GPTDatasetConfig(SEED, length, blend_per_split=[(prefixes, None), None, None],
                               path_to_cache=cache, tokenizer=Tokenizer(), **given)


def built(mm, config, samples):
    """What the builder makes of a config to train on."""
    sizes = [samples, None, None]
    return mm.BlendedMegatronDatasetBuilder(mm.GPTDataset, sizes, lambda: True, config).build()[0]


def gpt_dataset(mm, prefix, length, cache, flags="none"):
    """One epoch of a whole corpus as a GPTDataset."""
    config = config_of(mm, [prefix], length, cache, flags)
    low = mm.GPTDataset.build_low_level_dataset(prefix, config)
    indices = np.arange(len(low), dtype=np.int32)
    return mm.GPTDataset(low, prefix, indices, None, mm.Split.train, config)


@functools.lru_cache(maxsize=3)
def opened(mm, documents, length, flags):
    """A dataset to read from; all competitors share one cache, which the first of them writes."""
    cache, prefix = os.path.join(home(), "cache"), corpus(documents)
    if flags == "verify_reads" and not os.path.exists(f"{prefix}.sum"):
        load("Python").write_checksums(prefix)
    return gpt_dataset(mm, prefix, length, cache, flags)


# ==============================================================================
# 2. Other processes
# ==============================================================================
# Peaks and starts are measured in fresh processes.
#
# Some cases need ranks.  Two processes, forked once, run such a case as the parent would, each its
# side of it, and stop where it stops; the parent's clock runs until both have answered.


def child(*command, **environment):
    """Run Python with these arguments to its end -> what it prints."""
    environment["PYTHONPATH"] = os.path.dirname(os.path.abspath(__file__))
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "PYTHONWARNINGS": "ignore", **environment}).stdout


def in_a_child(function, *arguments):
    """Call a function of this file, by its name, in a fresh process -> what it returns."""
    return json.loads(child("-c", f"import bench, json\nbench.home = lambda: {home()!r}\n"
                                  f"print(json.dumps(bench.{function}(*{arguments!r})))"))


def memory(key, file="self/status"):
    """A line of a file in /proc, in bytes; nan where there is none.

    VmHWM is the most that was resident; ru_maxrss would begin with what the parent had.
    """
    path = Path("/proc", file)
    found = re.search(rf"{key}:\s+(\d+) kB", path.read_text() if path.exists() else "")
    return 1024 * int(found[1]) if found else math.nan


def peak_of(function, name, n, sizes):
    """For a child: how far the timed part of a case raises memory, without and with mapped files.
    """
    steps = globals()[function](load(name), n, **sizes)
    next(steps)
    before, clock = memory("VmHWM"), Stopwatch()
    next(steps)
    return clock.most, memory("VmHWM") - before


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


def build_four(mm, n, threads):
    """The builder: 90 % of an epoch of four corpora, blended, their caches beside them."""
    folder, low = fresh_folder(), corpus(n // 4, None)
    for name, suffix in itertools.product("abcd", (".bin", ".idx")):
        os.symlink(low + suffix, os.path.join(folder, name + suffix))
    prefixes = [os.path.join(folder, name) for name in "abcd"]
    config = config_of(mm, prefixes, 2048, None, num_dataset_builder_threads=threads)
    yield
    ds = built(mm, config, int(0.9 * n * 500 / 2048))
    yield
    return ds.dataset_index, ds.dataset_sample_index, [
        (part.document_index, part.sample_index, part.shuffle_index) for part in ds.datasets]


def samples(mm, n, S, flags):
    """dataset[i] in order, which reads all over a file of 100,000 documents."""
    ds = opened(mm, 100_000, S, flags)
    yield
    for i in range(n):
        ds[i]
    yield
    return [ds[i] for i in range(64)]


def batches(mm, n, S, flags="none", workers=0):
    """The DataLoader, micro-batches of 8, from the first to be made; worker processes run."""
    ds = opened(mm, 100_000, S, flags)
    loader = mm.build_pretraining_data_loader(ds, 0, micro_batch_size=8, num_workers=workers)
    first = next(iterator := iter(loader)) if workers else None
    yield
    for batch in itertools.islice(iterator if workers else loader, n // 8):
        pass
    yield
    first = first or batch
    return [with_cu_seqlens(each) if "cu_seqlens" in flags else each for each in (first, batch)]


def with_cu_seqlens(batch):
    """A batch, with what upstream does not tell: where each document begins, and the longest."""
    rows, length = batch["position_ids"].shape
    edges = torch.full((rows, length + 1), length, dtype=torch.int32)
    for row, positions in zip(edges, batch["position_ids"]):
        starts = (positions == 0).nonzero().flatten()
        row[:len(starts)] = starts
    return {"cu_seqlens": edges, "max_seqlen": edges.diff().amax(1), **batch}


def crops(_, n, S):
    """nanoGPT's get_batch: tokens and labels from anywhere in the file."""
    data = np.memmap(f"{corpus(100_000)}.bin", np.uint16, "r")
    yield
    for _ in range(n // 8):
        places = torch.randint(len(data) - S, (8,))
        for shift in (0, 1):
            torch.stack([torch.from_numpy(data[i + shift:i + shift + S].astype(np.int64))
                         for i in places])
    yield


def ready_tensors(_, n, S, workers=0):
    """torch's DataLoader over a list of ready samples, of a single tensor each."""
    ready = list(torch.ones(n + 8, S, dtype=torch.int64))
    loader = iter(torch.utils.data.DataLoader(ready, 8, num_workers=workers))
    next(loader)
    yield
    for _ in loader:
        pass
    yield


def write(mm, n, kind, part):
    """A new pair of documents as lists (what tokenizers give) or int32 arrays."""
    rng, prefix = np.random.default_rng(SEED), os.path.join(fresh_folder(), "pair")
    few = [rng.integers(0, EOD, length, dtype=np.int32) for length in lengths_of(1000)]
    few = [tokens.tolist() for tokens in few] if kind == "lists" else few
    builder = mm.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)

    def add_document():
        for tokens in itertools.islice(itertools.cycle(few), n):
            builder.add_document(tokens, [len(tokens)])

    steps = [add_document, lambda: builder.finalize(f"{prefix}.idx")]
    now = part == "finalize"
    if now:
        add_document()
    yield
    steps[now]()
    yield
    if not now:
        steps[1]()
    return written_files()["pair.idx" if now else "pair.bin"]


def merge(mm, n):
    """merge of two pairs of n / 2 documents each; for each upstream collects garbage: 0.2 s."""
    inputs = [corpus(n // 2, seed) for seed in (1, 2)]
    output = os.path.join(fresh_folder(), "pair")
    yield
    mm.merge(inputs, output)
    yield
    return written_files()


@functools.cache
def texts():
    """Modules of Python's library, as the demo reads them, in pieces of 2,000 characters."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))[:150]
    code = "".join(path.read_text("utf-8", "replace") for path in modules)
    return [code[i:i + 2000] for i in range(0, len(code), 2000)]


@functools.cache
def tokenizer_json():
    """Train a BPE of 4,096 tokens on them -> its path."""
    tokenizers, path = load("tokenizers alone"), os.path.join(home(), "tokenizer.json")
    bytewise = tokenizers.pre_tokenizers.ByteLevel
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = bytewise(add_prefix_space=False)
    bpe.train_from_iterator(texts()[::8], tokenizers.trainers.BpeTrainer(
        vocab_size=4096, show_progress=False, special_tokens=["<|endoftext|>"],
        initial_alphabet=bytewise.alphabet()))
    bpe.save(path)
    return path


def verify(mm, n, part):
    """The checksums of a pair of 1 kB documents: made, or compared with all of its bytes."""
    prefix = corpus(n)
    mm.write_checksums(prefix)
    ds = mm.IndexedDataset(prefix)
    yield
    ds.verify_bin() if part == "verify_bin" else mm.write_checksums(prefix)
    yield


def preprocess(mm, n, tokenizer):
    """preprocess in one process, where tokenizers has threads; upstream's is but a script."""
    path, output = os.path.join(home(), f"text-{n}.jsonl"), os.path.join(fresh_folder(), "pair")
    rows = (json.dumps({"text": text}) + "\n" for text in itertools.cycle(texts()))
    Path(path).write_text("".join(itertools.islice(rows, n)), encoding="utf-8")
    made = mm.build_tokenizer(tokenizer_json() if tokenizer == "BPE" else tokenizer)
    yield
    prefix = mm.preprocess([path], output, made, append_eod=True)["text"]
    yield
    return np.fromfile(f"{prefix}.bin", np.uint16)


def tokenizers_alone(tokenizers, n, tokenizer):
    """The same texts from memory to ids in the memory of the library."""
    given = list(itertools.islice(itertools.cycle(texts()), n))
    made = tokenizers.Tokenizer.from_file(tokenizer_json())
    yield
    encodings = made.encode_batch_fast(given)
    yield
    return np.concatenate([[*each.ids, 0] for each in encodings]).astype(np.uint16)


IMPORTS = {"upstream": """
import logging, torch
logging.disable()
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
def load(dataset):
    return torch.utils.data.DataLoader(dataset, 8)
""", "ours": """
from megatron_min import *
def load(dataset):
    return build_pretraining_data_loader(dataset, 0, micro_batch_size=8)
"""}
START = """
class Tokenizer:
    vocab_size, eod, unique_identifiers = 50257, 50256, {}
config = GPTDatasetConfig(
    1234, 2048, blend_per_split=[([PREFIX], None), None, None], path_to_cache=CACHE,
    tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
    eod_mask_loss=False, create_attention_mask=False)
train = BlendedMegatronDatasetBuilder(
    GPTDataset, [1000, None, None], lambda: True, config).build()[0]
print(next(iter(load(train)))["tokens"].tolist())
"""


def first_batch(mm, n, documents):
    """A script that builds a dataset and reads a batch, from the start of Python to its end."""
    ours, name = mm.__name__ != "upstream", mm.__name__.removeprefix("megatron_min_")
    where = f"PREFIX, CACHE = {corpus(documents)!r}, {fresh_folder()!r}"
    script = IMPORTS["ours" if ours else name] + where + START
    yield
    tokens = child("-c", script, MEGATRON_MIN_C=str(int(name == "C")))
    yield
    return tokens


def inspect(mm, n, documents):
    """megatron-min inspect."""
    prefix = corpus(documents, None)
    yield
    shown = child("-m", "megatron_min", "inspect", prefix)
    yield
    return shown


PEERS = {  # beside upstream: name -> the package that it needs, and a case that does a like job
    "nanoGPT's crop": ("numpy", crops),
    "ready tensors": ("torch", ready_tensors),
    "tokenizers alone": ("tokenizers", tokenizers_alone),
}


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

    names    the competitors; the first may be a peer instead of upstream
    twin_n   items for the Python twin, where it is far slower than the others
    kept     items in the outcome, if not all n; 0: it makes no sense to copy them
    once     the run that is compared is the one that is timed, too
    note     (case, names) -> what else to say in the table
    """

    def __init__(self, function, title, unit, n, twin_n=None, names=NAMES, kept=None, once=False,
                 note=None, **sizes):
        self.function, self.title, self.names, self.note = function, title, names, note
        self.n, self.twin_n, self.sizes, self.once = n, twin_n or n, sizes, once
        self.kept = n if kept is None else kept
        self.size = ", ".join([f"{n:,} {unit}", *(f"{key}={sizes[key]}" for key in sizes)])
        if names[0] in PEERS:
            self.size += f" (against {names[0]})"
        if once:
            self.run = functools.cache(self.run)

    def items(self, name):
        """How many items this competitor is given."""
        return self.twin_n if name == "Python" else self.n

    def start(self, name, n=None):
        """The case up to where the clock starts."""
        function = PEERS[name][1] if name in PEERS else self.function
        steps = function(load(name), n or self.items(name), **self.sizes)
        next(steps)
        return steps

    def run(self, name, n, wanted):
        """A run of n items -> milliseconds, and the outcome if it is wanted."""
        steps = self.start(name, n)
        start = time.perf_counter()
        next(steps)
        seconds = time.perf_counter() - start
        try:
            return 1e3 * seconds, next(steps) if wanted else None
        except StopIteration as stop:
            return 1e3 * seconds, stop.value

    def milliseconds(self, name):
        """One timed run, scaled to n items."""
        items = self.items(name)
        return self.run(name, items, self.once)[0] * self.n / items

    def outcome(self, name, n):
        """What a run of n items gives."""
        return self.run(name, n, True)[1]

    def copy_milliseconds(self, arrays):
        """numpy's copy of an outcome into fresh memory, scaled to n items."""
        start = time.perf_counter()
        for array in arrays:
            array.copy()
        return 1e3 * (time.perf_counter() - start) * self.n / self.kept

    def bytes_a_token(self, names):
        """A note: what a run on two ranks has broadcast."""
        tokens, sent = self.n * 8 * self.sizes["S"], []
        for name in names:
            self.milliseconds(name)
            sent.append(f"{ask('sent')[0] / tokens:.1f}")
        return f"bytes a token {' '.join(sent)}"

    def peaks(self, names):
        """A note: how much memory the first and the last take, in a fresh process each."""
        peaks = {name: in_a_child("peak_of", self.function.__name__, name, self.n, self.sizes)
                 for name in (names[0], names[-1])}
        return "peak MiB (with mapped files) " + ", ".join(
            f"{name} {own / 2**20:,.0f} ({all_of_it / 2**20:,.0f})"
            for name, (own, all_of_it) in peaks.items())

    def bare(self, names):
        """A note: the least that a start with torch takes."""
        start = time.perf_counter()
        child("-c", "import torch")
        return f"import torch alone {1e3 * (time.perf_counter() - start):,.0f} ms"

    def different(self, names):
        """The names whose outcome is not that of the first, compared at the size that both run."""
        if len(names) < 2:
            return []
        wanted = functools.cache(functools.partial(self.outcome, names[0]))
        sizes = {name: min(self.items(name), self.items(names[0])) for name in names[1:]}
        if names[0] in PEERS and wanted(self.n) is None:  # some have nothing to compare
            return self.different(names[1:])
        return [name for name, n in sizes.items() if not same(wanted(n), self.outcome(name, n))]


def all_cases(quick):
    """The rows of the table, from top to bottom."""
    big, drawn, reads, docs, dense = (500_000, 50_000, 512, 2_000, 32) if quick else (
        10**7, 10**6, 4_000, 10**5, 128)
    build_n, twin, steps = (200_000, 2_000, 2) if quick else (10**7, 10_000, 16)
    ours = "C" if load("C") else "Python"  # where no kernel runs, or a twin is no match
    both, (crop, ready, alone) = (NAMES[0], ours), ((peer, ours) for peer in PEERS)
    mixed = functools.partial(Case, unit="samples", n=drawn, twin_n=twin)
    start = functools.partial(Case, unit="start", n=1, kept=0, once=quick)
    loader = functools.partial(Case, batches, "DataLoader", "samples", kept=16, S=2048)
    return [
        *(Case(sample_index, "sample index", "documents", big, S=S) for S in (128, 2048, 8192)),
        Case(shuffle, "shuffle", "int32", big),
        *(mixed(blend, "blend", datasets=count, weights=weights)
          for weights in ("random", "equal", "1/k")[:1 if quick else 3]
          for count in (2, 4, 16, 64, 256, 1024, 4096)),
        *(mixed(exhaustive_blend, "exhaustive blend", datasets=count, weights="random")
          for count in (16, 1024)),
        Case(build, "GPTDataset, new cache", "documents", build_n, S=2048,
             note=None if quick else Case.peaks),
        *(Case(cache_hit, "GPTDataset, cache hit", "documents", build_n, S=2048, flags=flags)
          for flags in ("none", "fast_cache_load")),
        *(Case(build_four, "builder, 4 corpora", "documents", build_n, names=both, threads=threads)
          for threads in (1, 4)),
        *(Case(samples, "dataset[i]", "samples", reads, kept=64, S=S, flags="none")
          for S in (512, 2048, 8192)),
        *(loader(n=n, flags=flags) for n, flags in (
            (reads, "none"), (reads, "resets"), (reads, "cu_seqlens, upstream: resets"),
            (dense, "dense resets"), (reads, "verify_reads"))),
        loader(n=2 * reads, names=both, workers=2),
        *(loader(n=reads, names=names) for names in (crop, ready)),
        loader(n=2 * reads, names=ready, workers=2),
        *(Case(write, "write a pair", "documents", docs, kind=kind, part=part)
          for kind, part in (("lists", "add_document"), ("arrays", "add_document"),
                             ("arrays", "finalize"))),
        Case(merge, "merge two pairs", "documents", docs),
        *(Case(verify, "checksums", "documents of 1 kB", docs, names=[ours], kept=0, part=part)
          for part in ("write_checksums", "verify_bin")),
        *(Case(preprocess, "preprocess", "documents of 2 kB", docs // 10, names=names,
               tokenizer=tokenizer) for names, tokenizer in ((NAMES[1:], "bytes"), (alone, "BPE"))),
        start(first_batch, "import to first batch", names=both, documents=100_000, note=Case.bare),
        start(inspect, "megatron-min inspect", names=[ours], documents=big),
        *(Case(tp_batch, "parallel, tp batch", "batches of 8", n, kept=1, S=S, mask=mask,
               note=Case.bytes_a_token)
          for n, S, mask in ((reads // 40, 2048, False), (reads // 100, 512, True))),
        Case(cp_batch, "parallel, cp batch", "batches of 8", reads // 20, kept=1, S=8192, cp=2),
        *(Case(ddp_step, "parallel, DDP step", "steps", steps, kept=0, parameters=2**21,
               overlap=overlap) for overlap in (False, True)),
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


def arrays_in(outcome):
    """All its arrays, tensors and bytes, as arrays."""
    if isinstance(outcome, (dict, list, tuple)):
        parts = outcome.values() if isinstance(outcome, dict) else outcome
        return [array for part in parts for array in arrays_in(part)]
    if isinstance(outcome, bytes):
        return [np.frombuffer(outcome, np.uint8)]
    return [np.asarray(outcome)] if isinstance(outcome, (np.ndarray, torch.Tensor)) else []


def measure(case, rounds, seconds):
    """-> the row of a case: so many rounds, and more, up to 50, until the seconds are over; but
    two where they take ten seconds."""
    names = [name for name in case.names if load(name)]
    differs = case.different(names)
    clocks = {name: functools.partial(case.milliseconds, name)
              for name in names if name not in differs}
    if case.kept:
        outcome = case.outcome(names[-1], case.items(names[-1]))
        clocks["memcpy"] = functools.partial(case.copy_milliseconds, arrays_in(outcome))
    runs = {name: [] for name in clocks}
    gc.collect()
    start = time.perf_counter()
    for number in range(51):  # number 0 warms up
        for name, clock in clocks.items():
            runs[name].append(clock())
        taken = time.perf_counter() - start
        if case.once or number >= rounds and taken > seconds or number >= 2 and taken > 10:
            break
    runs = {name: times[1:] or times for name, times in runs.items()}
    return {"case": case.title, "n": case.n, "twin_n": case.twin_n,
            "size": case.size + (f"; {case.note(case, names)}" if case.note else ""),
            "other": next(iter({*case.names} & {*PEERS}), NAMES[0]),
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


def beside(text, row, *names):
    """A cell about upstream; in brackets about a peer instead, which the size names."""
    cell = text(row, *names, row["other"])
    return f"({cell})" if row["other"] in PEERS and cell != "-" else cell


def ours(row):
    """The least median of ours, or None."""
    return min((row["median_ms"][name] for name in NAMES[1:] if name in row["median_ms"]),
               default=None)


def rate(row):
    """A cell: items that our fastest does in a second."""
    return f"{1e3 * row['n'] / ours(row):,.{0 if row['n'] > 1 else 2}f}" if ours(row) else "-"


def against_copy(row):
    """A cell: how much longer than copying the result ours takes."""
    copied = row["median_ms"].get("memcpy")
    return f"{ours(row) / copied:,.1f}" if ours(row) and copied else "-"


#: title, width (negative: to the left), row -> text.
COLUMNS = [
    ("case", -21, lambda row: row["case"]),
    ("size", -66, lambda row: row["size"]),
    ("upstream ms", 11, lambda row: beside(milliseconds, row)),
    ("Python ms", 9, lambda row: milliseconds(row, "Python")),
    ("C ms", 7, lambda row: milliseconds(row, "C")),
    ("C against upstream", 18, lambda row: beside(ratio, row, "C")),
    ("C against Python", 16, lambda row: ratio(row, "C", "Python")),
    ("ours, items/s", 13, rate),
    ("C / memcpy", 10, against_copy),
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
    parser.add_argument("--billion", action="store_true", help="cost against size")
    parser.add_argument("--documents", type=int, default=10**9, help="with --billion: the most")
    parser.add_argument("--plot", default="billion.png", help="with --billion: a PNG (%(default)s)")
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
    if arguments.billion:
        return billion(arguments)
    rounds, seconds = (3, 0.1) if arguments.quick else (5, 2)
    rounds = arguments.rounds or rounds
    out = sys.stderr if arguments.json == "-" else sys.stdout
    show, head, rows = functools.partial(print, file=out, flush=True), machine(), []
    show("; ".join(f"{key} {value}" for key, value in head.items()), end="; ")
    show(f"medians of {rounds} rounds or more, or 2 of slow cases\n")
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
# 5. A billion documents
# ==============================================================================
# Cost against size, of ours alone: upstream holds several int64 for each document, and runs out of
# memory.  A size is made, indexed in a fresh process for each number of epochs, and removed.

SCALE = [  # title, key, digits after the point
    ("documents", "documents", 0), ("epochs", "epochs", 0), ("samples", "samples", 0),
    ("open s", "open", 2), ("build s", "build", 2), ("cache hit s", "hit", 2),
    ("first batch s", "batch", 2), ("inspect s", "inspect", 1), ("build ns/document", "each", 1),
    ("own GiB", "own", 2), ("GiB with mapped files", "peak", 2),
]


def billion(options):
    """Print the table of sizes, plot it -> 0."""
    show = functools.partial(print, flush=True)
    show("; ".join(f"{key} {value}" for key, value in machine().items()), "S=2048", sep="; ")
    show(f"\n| {' | '.join(title for title, _, _ in SCALE)} |\n|{' --: |' * len(SCALE)}")
    rows, left_out, name = [], [], "C" if load("C") else "Python"
    sizes = [10**power for power in range(6, 10) if 10**power < options.documents]
    for documents in [*sizes, options.documents]:
        for epochs in (1, 3, 10):
            needed, free = 8 * documents * (epochs + 1), memory("MemAvailable", "meminfo")
            if needed > free:
                left_out.append(f"{documents:,} documents x {epochs} epochs: about "
                                f"{needed / 2**30:,.0f} GiB wanted, {free / 2**30:,.0f} there")
                continue
            rows.append(in_a_child("indexed", name, corpus(documents, None), epochs))
            cells = [f"{rows[-1][key]:,.{digits}f}" for _, key, digits in SCALE]
            show(f"| {' | '.join(cells)} |")
        for suffix in (".bin", ".idx"):
            Path(corpus(documents, None) + suffix).unlink()
    show(*["\nleft out, too large for the memory of this machine:"] * bool(left_out), *left_out,
         sep="\n")
    show("not run: upstream, which runs out of memory at a billion documents")
    if importlib.util.find_spec("matplotlib"):
        plot(rows, options.plot)
        show(f"plot: {options.plot}")
    return 0


def indexed(name, prefix, epochs):
    """For a child: build a corpus's dataset with its cache, and use it -> seconds and bytes."""
    mm, cache, clock = load(name), fresh_folder(), Stopwatch()
    low = mm.IndexedDataset(prefix)
    seconds, documents = {"open": clock.lap()}, len(low)
    tokens = low.num_tokens
    del low
    config, samples = config_of(mm, [prefix], 2048, cache), (tokens * epochs - 1) // 2048
    clock.lap()
    ds = built(mm, config, samples)
    seconds["build"] = clock.lap()
    own, peak = clock.most / 2**30, memory("VmHWM") / 2**30
    next(iter(mm.build_pretraining_data_loader(ds, 0, micro_batch_size=8)))
    seconds["batch"] = clock.lap()
    built(mm, config, samples)
    seconds["hit"] = clock.lap()
    child("-m", "megatron_min", "inspect", prefix)
    seconds["inspect"] = clock.lap()
    return {"documents": documents, "epochs": epochs, "samples": len(ds), "own": own, "peak": peak,
            "each": 1e9 * seconds["build"] / documents / epochs, **seconds}


class Stopwatch:
    """Seconds since the last look; in the background, the most memory that is no mapped file."""

    def __init__(self):
        self.start, self.first, self.most = time.perf_counter(), memory("RssAnon"), 0
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self):
        """Look, again and again: no high-water mark of Linux leaves mapped files out."""
        while True:
            self.most = max(self.most, memory("RssAnon") - self.first)
            time.sleep(0.01)

    def lap(self):
        """-> seconds."""
        start, self.start = self.start, time.perf_counter()
        return self.start - start


def plot(rows, path):
    """Seconds and memory against documents: as straight as the dotted lines, if all is well."""
    import matplotlib
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    keys = ("build", "hit", "inspect", "batch", "open"), ("own", "peak")
    for axes, shown, what in zip(both, keys, ("seconds", "peak memory, GiB")):
        for key, epochs in itertools.product(shown, sorted({row["epochs"] for row in rows})):
            if key == shown[0] or epochs == 1:
                part = [row for row in rows if row["epochs"] == epochs]
                sizes, values = ([row[of] for row in part] for of in ("documents", key))
                title = next(title for title, of, _ in SCALE if of == key).removesuffix(" s")
                axes.loglog(sizes, values, "o-", label=f"{title}, epochs: {epochs}")
                if key == shown[0]:
                    axes.loglog(sizes, [values[0] * n / sizes[0] for n in sizes], "k:")
        axes.set_xlabel("documents (dotted: in proportion)")
        axes.set_ylabel(what)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", loc="upper left")
    figure.savefig(path, dpi=120)


# ==============================================================================
# 6. Training on any layout
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
# 7. The same under pytest-benchmark
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
    benchmark.pedantic(next, setup=lambda: ((case.start(name),), {}),
                       rounds=1 if case.once else 5, warmup_rounds=not case.once)


if __name__ == "__main__":
    sys.exit(main())
