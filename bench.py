#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast is it?  A table of megatron-core 0.16.1 ("upstream"), our Python and our C.

    python bench.py                 the rows that tell most, on one screen, in under a minute
    python bench.py --full          all rows, in some minutes
    python bench.py --only blend    those of all rows whose case matches a regular expression
    python bench.py --storage       samples from object storage: speed, requests, bytes
    python bench.py --json FILE     every single time too; "-" is stdout, the table goes to stderr
    python bench.py --billion       time and memory against size, up to a billion documents
    pytest bench.py                 the rows of the screen in pytest-benchmark, to compare and keep

Inputs come from fixed seeds, and lie in a temporary folder (TMPDIR).  For each row the competitors
run once without a clock, which warms up files and memory, and their results are compared; one that
differs gets no time.  Then they take turns, A B C A B C ..., so that a slow moment of the machine
hits all alike.  Shown are the medians, in milliseconds.

To add a row, write a case (section 3) and add it to a list of section 4.
"""

import argparse
import atexit
import concurrent.futures
import dataclasses
import datetime
import functools
import gc
import http.server
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import math
import multiprocessing
import os
import pathlib
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
import typing
import unittest.mock
import urllib.request
import warnings

import numpy as np
import torch
import torch.distributed
import torch.utils.data

NAMES = ("upstream", "Python", "C")
WITHOUT_C = ("upstream", "Python")  # of rows in which no C kernel runs
SEED = 1234
EOD = 50256

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # torchrun does so too; the threads of a busy machine wait long

# ==============================================================================
# 1. The competitors
# ==============================================================================
# Each is a module with upstream's public names, so that a case runs the same lines on all three.


@functools.cache
def load(name):
    """The module of a competitor, ours as a private copy; None where it is missing."""
    if name == "upstream":
        return load_upstream()
    path = pathlib.Path(__file__).resolve().parent / "megatron_min.py"
    spec = importlib.util.spec_from_file_location(f"megatron_min_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with unittest.mock.patch.dict(os.environ, MEGATRON_MIN_C="1" if name == "C" else "0"):
        try:
            spec.loader.exec_module(module)
        except ImportError:
            return None
    return module


def load_upstream():
    """The data path of megatron-core, and our re-creations of what only its scripts have."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import blended_megatron_dataset_builder as builder
            from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset, utils
    except ImportError:
        return None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    upstream = types.ModuleType("upstream")  # all names of these modules in one
    for part in (utils, helpers, indexed_dataset, gpt_dataset, builder):
        upstream.__dict__.update(part.__dict__)
    upstream.__name__ = "upstream"
    upstream.shuffle = shuffle_with_numpy
    upstream.get_batch_on_this_cp_rank = upstream_cp_batch
    upstream.build_pretraining_data_loader = recreated_data_loader
    upstream.merge = recreated_merge
    upstream.ParallelGroups = no_groups
    upstream.get_batch_on_this_tp_rank = recreated_tp_batch
    return upstream


def shuffle_with_numpy(items, random_state):
    """What upstream calls to shuffle."""
    random_state.shuffle(items)


def upstream_cp_batch(batch, rank, size):
    """Upstream's function, which changes its batch, and asks a process group for rank and size."""
    from megatron.core.utils import get_batch_on_this_cp_rank

    return get_batch_on_this_cp_rank(dict(batch), torch.distributed.group.WORLD)


def recreated_data_loader(dataset, consumed_samples, *, micro_batch_size, num_workers):
    """The loader of the training script: torch's, whose worker processes stay."""
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return torch.utils.data.DataLoader(dataset, batch_size=micro_batch_size, **workers)


def recreated_merge(prefixes, output_prefix):
    """The script that merges pairs."""
    upstream = load("upstream")
    dtype = upstream.IndexedDataset(prefixes[0]).index.dtype
    builder = upstream.IndexedDatasetBuilder(f"{output_prefix}.bin", dtype)
    for prefix in prefixes:
        builder.add_index(prefix)
    builder.finalize(f"{output_prefix}.idx")


def no_groups(**sizes):
    """In place of ParallelGroups: the next function broadcasts over all ranks."""
    return None


def recreated_tp_batch(data_iterator, groups, *, micro_batch_size, sequence_length, **options):
    """How the training script hands a batch to the tensor-parallel ranks: five broadcasts."""
    row = (micro_batch_size, sequence_length)
    layout = {
        "tokens": (row, torch.int64),
        "labels": (row, torch.int64),
        "loss_mask": (row, torch.float32),
        "attention_mask": ((micro_batch_size, 1, sequence_length, sequence_length), torch.bool),
        "position_ids": (row, torch.int64),
    }
    if data_iterator is not None:
        batch = next(data_iterator)
    else:
        batch = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in layout.items()}
    for key in layout:
        torch.distributed.broadcast(batch[key], 0)
    return batch


# ==============================================================================
# 2. Clock, files, datasets, processes
# ==============================================================================


class Clock:
    """A stopwatch that runs only inside its with block; ranks start and stop it together."""

    def __init__(self):
        self.seconds = 0.0
        self._started = None

    def __enter__(self):
        wait_for_all_ranks()
        self._started = time.perf_counter()

    def __exit__(self, kind, error, traceback):
        wait_for_all_ranks()
        self.seconds += time.perf_counter() - self._started

    def read(self):
        """The seconds so far.  For pytest-benchmark this is the time of day."""
        return self.seconds


def wait_for_all_ranks():
    """Return when all ranks are here; at once where this process is alone."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()


@functools.cache
def home():
    """The temporary folder of this process."""
    folder = tempfile.mkdtemp(prefix="megatron-min-bench-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def fresh_folder():
    """The folder that a single run writes to, empty again."""
    folder = os.path.join(home(), "fresh")
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder)
    return folder


def written_files():
    """{name: bytes} of what the last run left in its folder; the manifest is ours alone."""
    files = {}
    for path in pathlib.Path(home(), "fresh").iterdir():
        if not path.name.endswith("-manifest.json"):
            files[path.name] = path.read_bytes()
    return files


@functools.lru_cache(maxsize=2)
def lengths_of(documents):
    """Tokens in each document, int32: 1 to 999, 500 in the mean."""
    return np.random.default_rng(SEED).integers(1, 1000, documents, dtype=np.int32)


@functools.lru_cache(maxsize=1)
def order_of(documents):
    """The documents in random order, int32."""
    return np.random.default_rng(SEED).permutation(documents).astype(np.int32)


@functools.cache
def corpus(documents, seed=SEED):
    """Write a pair of random uint16 tokens -> its prefix.  Without a seed the .bin is one big hole.

    The lengths repeat after a million documents, so that a billion of them need little memory here.
    """
    prefix = os.path.join(home(), f"corpus-{documents}-{seed}")
    lengths = lengths_of(min(documents, 10**6))
    ends = np.cumsum(lengths, dtype=np.int64)
    firsts = range(0, documents, len(lengths))  # the first document of each repetition
    num_tokens = 0
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        for first in firsts:
            lengths[: documents - first].tofile(file)
        for first in firsts:
            pointers = 2 * (num_tokens + ends - lengths)
            pointers[: documents - first].tofile(file)
            num_tokens += int(lengths[: documents - first].sum(dtype=np.int64))
        for first in firsts:
            np.arange(first, min(first + len(lengths), documents)).tofile(file)
        file.write(struct.pack("<q", documents))
    with open(f"{prefix}.bin", "wb") as file:
        if seed is None:
            file.truncate(2 * num_tokens)
        else:
            tokens = np.random.default_rng(seed).integers(0, EOD, num_tokens, dtype=np.uint16)
            tokens[ends - 1] = EOD
            tokens.tofile(file)
    return prefix


class Tokenizer:
    """As much of a tokenizer as a dataset asks for."""

    vocab_size = EOD + 1
    eod = EOD
    unique_identifiers: typing.ClassVar = {"class": "bench.Tokenizer"}


def config_of(mm, prefixes, S, cache, **options):
    """The config of a job that trains on all of these corpora; options override these here."""
    plain = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")
    return mm.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=S,
        blend_per_split=[(prefixes, None), None, None],
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        **(dict.fromkeys(plain, False) | options),
    )


def gpt_dataset(mm, prefix, S, cache, **options):
    """One epoch of a whole corpus as a GPTDataset."""
    config = config_of(mm, [prefix], S, cache, **options)
    low = mm.GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(len(low), dtype=np.int32)
    return mm.GPTDataset(low, prefix, documents, None, mm.Split.train, config)


@functools.lru_cache(maxsize=3)
def dataset_to_read(mm, S, **options):
    """100,000 documents to read from; the competitors share the cache, which the first writes."""
    return gpt_dataset(mm, corpus(100_000), S, os.path.join(home(), "cache"), **options)


def indices_of(dataset):
    """The three index arrays of a GPTDataset."""
    return [dataset.document_index[:], dataset.sample_index[:], dataset.shuffle_index[:]]


def build_blend(mm, config, samples):
    """The training part that the builder makes of a config."""
    sizes = [samples, None, None]
    builder = mm.BlendedMegatronDatasetBuilder(mm.GPTDataset, sizes, is_built_here, config)
    return builder.build()[0]


def is_built_here():
    """For the builder: this process builds the datasets."""
    return True


def run_on_two_ranks(function, name, clock, n, sizes):
    """Run a case in two processes of one job -> what each returned; the slower one counts."""
    pipes = pipes_of_two_ranks()
    for pipe in pipes:
        pipe.send((function.__name__, name, n, sizes))
    answers = [pipe.recv() for pipe in pipes]
    clock.seconds += max(seconds for seconds, _ in answers)
    return [result for _, result in answers]


@functools.cache
def pipes_of_two_ranks():
    """Start the two processes, once; they end with this one.  (A fork would copy locked locks.)"""
    context = multiprocessing.get_context("spawn")
    store = f"file://{fresh_folder()}/store"
    pipes = []
    for rank in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=serve_rank, args=(rank, store, theirs), daemon=True).start()
        pipes.append(ours)
    return pipes


def serve_rank(rank, store, pipe):
    """One of the two processes: run the cases that it is told."""
    torch.set_num_threads(1)
    minute = datetime.timedelta(minutes=1)
    torch.distributed.init_process_group("gloo", store, minute, world_size=2, rank=rank)
    while True:
        function_name, name, n, sizes = pipe.recv()
        clock = Clock()
        result = globals()[function_name](load(name), clock, n, **sizes)
        pipe.send((clock.seconds, result))


# ==============================================================================
# 3. The cases
# ==============================================================================
# A case is a function of a competitor, a clock, a number of items, and sizes:
#
#     def case(mm, clock, n, S):
#         ...              untimed: inputs, an empty folder, an open file
#         with clock:
#             ...          timed
#         return ...       what must be equal: arrays, tensors, bytes, nested in lists and dicts


def samples(mm, clock, n, S):
    """dataset[i] in order, which reads all over the file."""
    dataset = dataset_to_read(mm, S)
    with clock:
        for i in range(n):
            dataset[i]
    return [dataset[i] for i in range(64)]


def loader(mm, clock, n, num_workers=0, **options):
    """Batches of 8 samples from the second on: the first one waits until workers have started."""
    dataset = dataset_to_read(mm, 2048, **options)
    sizes = {"micro_batch_size": 8, "num_workers": num_workers}
    batches = iter(mm.build_pretraining_data_loader(dataset, 0, **sizes))
    first = next(batches)
    with clock:
        for _ in range(n // 8):
            batch = next(batches)
    return [first, batch]


def nanogpt_crops(mm, clock, n):
    """As nanoGPT makes a batch: tokens and labels from anywhere in the file."""
    data = np.memmap(f"{corpus(100_000)}.bin", np.uint16, "r")
    with clock:
        for _ in range(n // 8):
            places = torch.randint(len(data) - 2048, (8,)).tolist()
            tokens = [torch.from_numpy(data[i : i + 2048].astype(np.int64)) for i in places]
            labels = [torch.from_numpy(data[i + 1 : i + 2049].astype(np.int64)) for i in places]
            torch.stack(tokens)
            torch.stack(labels)


def sample_index(mm, clock, n, S):
    """build_sample_idx: one epoch of documents in random order."""
    sizes = lengths_of(n)
    order = order_of(n)
    num_tokens = int(sizes.sum(dtype=np.int64))
    with clock:
        rows = mm.build_sample_idx(sizes, order, S, 1, num_tokens)
    return rows


def shuffle(mm, clock, n):
    """shuffle, of int32."""
    items = np.arange(n, dtype=np.int32)
    random_state = np.random.RandomState(SEED)
    with clock:
        mm.shuffle(items, random_state)
    return [items, random_state.get_state()]


def blend(mm, clock, n, datasets):
    """build_blending_indices, with random weights."""
    weights = np.random.default_rng(SEED).random(datasets)
    weights /= weights.sum()
    which = np.zeros(n, np.int16)
    sample = np.zeros(n, np.int64)
    with clock:
        mm.build_blending_indices(which, sample, weights, datasets, n, False)
    return [which, sample]


def build(mm, clock, n):
    """GPTDataset of one epoch, whose cache is written to an empty folder."""
    prefix = corpus(n, None)
    cache = fresh_folder()
    with clock:
        dataset = gpt_dataset(mm, prefix, 2048, cache)
    return [indices_of(dataset), written_files()]


def build_epochs(mm, clock, n, epochs, stable_order=True):
    """GPTDataset of several epochs, n documents in all, each epoch shuffled by itself."""
    prefix = corpus(n // epochs, None)
    cache = fresh_folder()
    config = config_of(mm, [prefix], 2048, cache, stable_order=stable_order)
    low = mm.GPTDataset.build_low_level_dataset(prefix, config)
    documents = np.arange(len(low), dtype=np.int32)
    samples = int(low.sequence_lengths.sum(dtype=np.int64)) * epochs // 2048 - 1
    with clock:
        dataset = mm.GPTDataset(low, prefix, documents, samples, mm.Split.train, config)
    return [indices_of(dataset), written_files()]


def build_plain_epochs(mm, clock, n, epochs):
    """The same in upstream's order, by our C."""
    build_epochs(load("C"), clock, n, epochs, stable_order=False)


def phases(mm, clock, n, datasets):
    """build_phase_indices: four phases with random weights."""
    mixes = []
    for weights in np.random.default_rng(SEED).random((4, datasets)):
        mixes.append((n // 4, weights / weights.sum()))
    which = np.zeros(n, np.int16)
    sample = np.zeros(n, np.int64)
    with clock:
        mm.build_phase_indices(which, sample, mixes)
    return [which, sample]


def plain_blend(mm, clock, n, datasets):
    """A blend of as many samples with the same weights all along, by our C."""
    blend(load("C"), clock, n, datasets)


def cache_hit(mm, clock, n, **options):
    """GPTDataset whose cache is there: all open the same one, which our Python has written."""
    prefix = corpus(n, None)
    cache = os.path.join(home(), "hit")
    gpt_dataset(load("Python"), prefix, 2048, cache, fast_cache_load=True)
    with clock:
        dataset = gpt_dataset(mm, prefix, 2048, cache, **options)
    return indices_of(dataset)


def build_four(mm, clock, n):
    """The builder, in four threads: 90 % of an epoch of four corpora, their caches beside them."""
    folder = fresh_folder()
    low = corpus(n // 4, None)
    prefixes = [os.path.join(folder, name) for name in "abcd"]
    for prefix in prefixes:
        os.symlink(f"{low}.bin", f"{prefix}.bin")
        os.symlink(f"{low}.idx", f"{prefix}.idx")
    config = config_of(mm, prefixes, 2048, None, num_dataset_builder_threads=4)
    with clock:
        dataset = build_blend(mm, config, int(0.9 * n * 500 / 2048))
    parts = [indices_of(part) for part in dataset.datasets]
    return [dataset.dataset_index, dataset.dataset_sample_index, parts]


def add_documents(mm, clock, n, add, convert):
    """Documents that are added one by one, as lists (what tokenizers give), arrays or tensors."""
    rng = np.random.default_rng(SEED)
    documents = []
    for length in lengths_of(1000):
        documents.append(convert(rng.integers(0, EOD, length, dtype=np.int32)))
    prefix = os.path.join(fresh_folder(), "pair")
    builder = mm.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    with clock:
        for tokens in itertools.islice(itertools.cycle(documents), n):
            add(builder, tokens)
    builder.finalize(f"{prefix}.idx")
    return written_files()


def add_document(builder, tokens):
    """A document by one call."""
    builder.add_document(tokens, [len(tokens)])


def add_item(builder, tokens):
    """A document by two."""
    builder.add_item(tokens)
    builder.end_document()


def merge(mm, clock, n):
    """merge, of two pairs of n / 2 documents each."""
    prefixes = [corpus(n // 2, seed) for seed in (1, 2)]
    output = os.path.join(fresh_folder(), "pair")
    with clock:
        mm.merge(prefixes, output)
    return written_files()


def preprocess(mm, clock, n):
    """preprocess in one process, into bytes, of pieces of Python's own library."""
    modules = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:150]
    code = "".join(path.read_text("utf-8", "replace") for path in modules)
    pieces = [code[i : i + 2000] for i in range(0, len(code), 2000)]
    folder = fresh_folder()
    with open(f"{folder}/text.jsonl", "w", encoding="utf-8") as file:
        for text in itertools.islice(itertools.cycle(pieces), n):
            file.write(json.dumps({"text": text}) + "\n")
    with clock:
        mm.preprocess(f"{folder}/text.jsonl", f"{folder}/pair", append_eod=True)
    return written_files()


def first_batch(mm, clock, n):
    """A script, from start to end, that builds a dataset of n documents and reads a batch."""
    name = mm.__name__.removeprefix("megatron_min_")
    script = f"import bench; bench.print_first_batch({name!r}, {corpus(n)!r}, {fresh_folder()!r})"
    command = [sys.executable, "-W", "ignore", "-c", script]
    folder = os.path.dirname(os.path.abspath(__file__))
    with clock:
        finished = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE)
    return finished.stdout


def print_first_batch(name, prefix, cache):
    """What the script does."""
    mm = load(name)
    dataset = build_blend(mm, config_of(mm, [prefix], 2048, cache), 1000)
    loader = mm.build_pretraining_data_loader(dataset, 0, micro_batch_size=8, num_workers=0)
    print(next(iter(loader))["tokens"].tolist())


def parallel_batch(S):
    """A micro-batch of 8 rows, as a loader gives it."""
    words = torch.from_numpy(np.random.default_rng(SEED).integers(0, EOD, (8, S + 1)))
    return {
        "tokens": words[:, :-1].contiguous(),
        "labels": words[:, 1:].contiguous(),
        "loss_mask": torch.ones(8, S),
        "position_ids": torch.arange(S).repeat(8, 1),
    }


def tp_batch(mm, clock, n, S):
    """get_batch_on_this_tp_rank: rank 0 has batches, and gives them to rank 1."""
    groups = mm.ParallelGroups(tensor=2)
    batches = None
    if torch.distributed.get_rank() == 0:
        batch = parallel_batch(S)
        batch["attention_mask"] = torch.ones(S, S, dtype=torch.bool).triu(1).repeat(8, 1, 1, 1)
        batches = itertools.repeat(batch)
    options = {"micro_batch_size": 8, "sequence_length": S, "create_attention_mask": True}
    with clock:
        for _ in range(n):
            batch = mm.get_batch_on_this_tp_rank(batches, groups, **options)
    return {key: tensor.numpy() for key, tensor in batch.items()}


def cp_batch(mm, clock, n, S):
    """get_batch_on_this_cp_rank: nothing is sent, but upstream wants a process group."""
    batch = parallel_batch(S)
    rank = torch.distributed.get_rank()
    with clock:
        for _ in range(n):
            part = mm.get_batch_on_this_cp_rank(batch, rank, 2)
    return {key: tensor.numpy() for key, tensor in part.items()}


def ddp_steps(mm, clock, n):
    """DistributedDataParallel: forward and backward of 8 layers, 2**21 parameters in 4 buckets."""
    layers, inputs = ddp_model()
    model = mm.DistributedDataParallel(layers, bucket_size=2**19, overlap_grad_reduce=True)
    return run_steps(clock, n, model, inputs)


def torch_ddp_steps(mm, clock, n):
    """The same with torch's."""
    layers, inputs = ddp_model()
    return run_steps(clock, n, TorchDDP(layers, bucket_cap_mb=2), inputs)


class TorchDDP(torch.nn.parallel.DistributedDataParallel):
    """torch's, with the names of ours."""

    def zero_grad_buffer(self):
        self.zero_grad()

    def finish_grad_sync(self):
        """Nothing is left to do: backward() has waited."""


def ddp_model():
    """Layers, the same on all ranks, and inputs that differ."""
    torch.manual_seed(SEED)
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
    inputs = torch.randn(64, 512) + torch.distributed.get_rank()
    return torch.nn.Sequential(*layers), inputs


def run_steps(clock, n, model, inputs):
    """A step without the clock, in which torch's settles its buckets; n steps; the gradients."""
    run_step(model, inputs)
    with clock:
        for _ in range(n):
            run_step(model, inputs)
    return [parameter.grad.numpy() for parameter in model.parameters()]


def run_step(model, inputs):
    """Forward, backward, and the sum over the ranks."""
    model.zero_grad_buffer()
    model(inputs).square().sum().backward()
    model.finish_grad_sync()


# ==============================================================================
# 4. The rows
# ==============================================================================


@dataclasses.dataclass
class Case:
    """A row of the table."""

    title: str  # ends in "*" where upstream's side is a script that is re-created here
    function: typing.Callable  # of section 3
    n: int
    unit: str  # what the n items are
    sizes: dict = dataclasses.field(default_factory=dict)  # more arguments of the function
    names: tuple = NAMES  # the competitors
    python_n: int | None = None  # items for our Python, where it is far slower than the others
    peer: typing.Callable | None = None  # a function that runs in upstream's place, and is not its
    ranks: int = 1

    def competitors(self):
        """The names of those that are there."""
        names = []
        for name in self.names:
            is_peer = name == "upstream" and self.peer is not None
            if is_peer or load(name) is not None:
                names.append(name)
        return names

    def items(self, name):
        """How many items a competitor is given."""
        if name == "Python" and self.python_n is not None:
            return self.python_n
        return self.n

    def run(self, name, n, clock):
        """Run a competitor on n items -> its result; the clock counts the seconds."""
        function = self.function
        if name == "upstream" and self.peer is not None:
            function = self.peer
        if self.ranks == 2:
            return run_on_two_ranks(function, name, clock, n, self.sizes)
        return function(load(name), clock, n, **self.sizes)

    def milliseconds(self, name):
        """One timed run, scaled to n items."""
        clock = Clock()
        items = self.items(name)
        self.run(name, items, clock)
        return 1e3 * clock.seconds * self.n / items


RESETS = {"reset_position_ids": True, "eod_mask_loss": True}
DENSE = {"reset_attention_mask": True, "create_attention_mask": True, **RESETS}
PACKED = {"inter_document_masking": True, "eod_mask_loss": True}  # not in upstream 0.16.1
TRUST = {"fast_cache_load": True}


def screen_cases():
    """The rows that tell most."""
    return [
        Case("dataset[i], S=512", samples, 4000, "samples", {"S": 512}),
        Case("dataset[i], S=2048", samples, 4000, "samples", {"S": 2048}),
        Case("dataset[i], S=8192", samples, 4000, "samples", {"S": 8192}),
        Case("loader, S=2048 *", loader, 4000, "samples"),
        Case("loader, num_workers=2 *", loader, 2000, "samples", {"num_workers": 2}),
        Case("loader, resets *", loader, 4000, "samples", RESETS),
        Case("loader, resets, dense mask *", loader, 64, "samples", DENSE),
        Case("sample index, S=2048", sample_index, 10**7, "documents", {"S": 2048}),
        Case("shuffle", shuffle, 10**7, "int32"),
        blend_case(16),
        blend_case(1024),
        Case("build, new cache, S=2048", build, 10**7, "documents"),
        add_case("add_document, arrays", add_document, np.asarray),
        Case("tp batch, S=512, mask *", tp_batch, 100, "batches", {"S": 512}, WITHOUT_C, ranks=2),
    ]


def more_cases():
    """The other rows."""
    return [
        Case("loader, cu_seqlens", loader, 4000, "samples", PACKED, ("Python", "C")),
        Case("loader (nanoGPT's crops)", loader, 4000, "samples", peer=nanogpt_crops),
        Case("sample index, S=128", sample_index, 10**7, "documents", {"S": 128}),
        Case("sample index, S=8192", sample_index, 10**7, "documents", {"S": 8192}),
        blend_case(4),
        blend_case(64),
        blend_case(256),
        blend_case(4096),
        Case("cache hit, S=2048", cache_hit, 10**7, "documents", {}, WITHOUT_C),
        Case("cache hit, fast_cache_load", cache_hit, 10**7, "documents", TRUST, WITHOUT_C),
        Case("builder, 4 corpora, threads", build_four, 10**6, "documents"),
        add_case("add_document, lists", add_document, np.ndarray.tolist),
        add_case("add_item, tensors", add_item, torch.from_numpy),
        add_case("add_item, lists", add_item, np.ndarray.tolist, ("Python",)),
        Case("merge two pairs *", merge, 100_000, "documents", {}, WITHOUT_C),
        Case("preprocess, bytes", preprocess, 10_000, "pages of 2 kB", {}, ("Python",)),
        Case("import to first batch", first_batch, 100_000, "documents", {}, WITHOUT_C),
        Case("cp batch, S=8192", cp_batch, 200, "batches", {"S": 8192}, WITHOUT_C, ranks=2),
        Case("DDP (torch's)", ddp_steps, 16, "steps", {}, WITHOUT_C, peer=torch_ddp_steps, ranks=2),
        *cases_beside_plain_ones(),
    ]


def cases_beside_plain_ones():
    """What upstream has no such part of, beside our C without it: the peer."""
    if load("C") is None:
        return []
    epochs = {"epochs": 2}
    datasets = {"datasets": 16}
    names = ("upstream", "C")
    title = "build, stable_order (plain)"
    return [
        Case(title, build_epochs, 10**7, "documents", epochs, names, peer=build_plain_epochs),
        Case("4 phases (plain blend)", phases, 10**6, "samples", datasets, names, peer=plain_blend),
    ]


def blend_case(datasets):
    """A blend; the definition would take minutes for as many samples as the others."""
    title = f"blend, {datasets:,} datasets"
    return Case(title, blend, 400_000, "samples", {"datasets": datasets}, python_n=10_000)


def add_case(title, add, convert, names=WITHOUT_C):
    """Documents that are added one by one; upstream's add_item takes tensors only."""
    sizes = {"add": add, "convert": convert}
    return Case(title, add_documents, 20_000, "documents", sizes, names)


# ==============================================================================
# 5. Measuring, and the table
# ==============================================================================


def measure(case, rounds, seconds):
    """Compare and time the competitors of a case -> its row.

    There are at least so many rounds, and more, up to 50, until the seconds are over.
    """
    names = case.competitors()
    different = find_different(case, names)
    times = {name: [] for name in names if name not in different}
    gc.collect()
    started = time.perf_counter()
    for number in range(1, 51):
        for name in times:
            times[name].append(case.milliseconds(name))
        if number >= rounds and time.perf_counter() - started > seconds:
            break
    return {
        "case": case.title,
        "size": f"{case.n:,} {case.unit}",
        "scaled": case.items("Python") < case.n,
        "peer": case.peer is not None,
        "different": different,
        "runs_ms": times,
        "median_ms": {name: statistics.median(times[name]) for name in times},
    }


def find_different(case, names):
    """Run all without a clock -> the names of those whose result is not that of the first.

    A competitor that is given fewer items is compared with the first on as many.  A peer may have
    no result.
    """
    first = names[0]
    expected = {case.items(first): case.run(first, case.items(first), Clock())}
    different = []
    for name in names[1:]:
        n = min(case.items(name), case.items(first))
        if n not in expected:
            expected[n] = case.run(first, n, Clock())
        result = case.run(name, n, Clock())
        if expected[n] is not None and not is_same(expected[n], result):
            different.append(name)
    return different


def is_same(a, b):
    """Are they equal in every value, dtype and shape, in nested lists and dicts too?"""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, (np.ndarray, torch.Tensor)):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return a == b


TITLES = ("case", "size", *NAMES, "Python x", "C x")
WIDTHS = (28, 20, 8, 8, 8, 8, 8)


def format_line(cells):
    """A line of the table, padded so that it reads well as text too."""
    padded = []
    for cell, width in zip(cells, WIDTHS, strict=True):
        padded.append(cell.ljust(width) if width > 8 else cell.rjust(width))
    return f"| {' | '.join(padded)} |"


def format_row(row):
    """The cells of a row."""
    times = [format_time(row, name) for name in NAMES]
    return [row["case"], row["size"], *times, format_ratio(row, "Python"), format_ratio(row, "C")]


def format_time(row, name):
    """A cell: the median of a competitor."""
    if name in row["different"]:
        return "differs"
    if name not in row["median_ms"]:
        return "-"
    text = format_number(row["median_ms"][name])
    if name == "Python" and row["scaled"]:
        return f"~{text}"
    if name == "upstream" and row["peer"]:
        return f"({text})"
    return text


def format_ratio(row, name):
    """A cell: how many times faster than upstream a competitor is."""
    medians = row["median_ms"]
    if name not in medians or "upstream" not in medians:
        return "-"
    text = f"{format_number(medians['upstream'] / medians[name])}x"
    if row["peer"]:
        return f"({text})"
    return text


def format_number(value):
    """A number with two digits after the point, one, or none."""
    if value < 10:
        return f"{value:.2f}"
    if value < 1000:
        return f"{value:.1f}"
    return f"{value:,.0f}"


def machine():
    """What the numbers depend on, as a dict of strings."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = re.search(r"model name\s*: (.*)", cpuinfo.read_text(encoding="utf-8"))
        if found:
            cpu = found[1]
    upstream = "not installed"
    if load("upstream"):
        upstream = importlib.metadata.version("megatron-core")
    return {
        "machine": f"{cpu}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "torch": f"{torch.__version__}, threads {torch.get_num_threads()}",
        "megatron-core": upstream,
        "megatron-min": load("Python").__version__,
        "C": "built" if load("C") else "not built",
        "date": str(datetime.date.today()),
    }


def print_machine(facts, out):
    """The head of a table, in two lines."""
    parts = [f"{key} {value}" for key, value in facts.items()]
    print("; ".join(parts[:3]), file=out)
    print("; ".join(parts[3:]), file=out)


def main(argv=None):
    """Print the table -> 0, or 1 if a result differs."""
    options = parse_options(argv)
    if options.billion:
        return billion(options.documents)
    out = sys.stderr if options.json == "-" else sys.stdout
    facts = machine()
    print_machine(facts, out)
    rules = ["-" * width if width > 8 else "-" * (width - 1) + ":" for width in WIDTHS]
    print(f"\n{format_line(TITLES)}\n{format_line(rules)}", file=out, flush=True)
    rows = []
    cases = chosen_cases(options)
    for number, case in enumerate(cases, 1):
        show_progress(f"row {number} of {len(cases)}: {case.title}")
        row = measure(case, options.rounds, seconds=3 if options.full else 1)
        show_progress("")
        print(format_line(format_row(row)), file=out, flush=True)
        rows.append(row)
    print_notes(rows, out)
    is_right = not any(row["different"] for row in rows)
    if options.storage or (options.full and not options.only):
        is_right = print_storage(out) and is_right
    if options.json:
        write_json({**facts, "rows": rows}, options.json)
    return int(not is_right)


def parse_options(argv):
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="all rows, in some minutes")
    parser.add_argument("--only", metavar="REGEX", help="those of all rows whose case matches")
    parser.add_argument("--json", metavar="FILE", help="write every time as JSON; -: to stdout")
    parser.add_argument("--storage", action="store_true", help="object storage, by itself")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs, at least (%(default)s)")
    parser.add_argument("--billion", action="store_true", help="time and memory against size")
    parser.add_argument("--documents", type=int, default=10**9, help="with --billion: at most")
    return parser.parse_args(argv)


def chosen_cases(options):
    """The rows that the command line asks for."""
    if options.storage:
        return []
    if options.only:
        cases = screen_cases() + more_cases()
        return [case for case in cases if re.search(options.only, case.title)]
    if options.full:
        return screen_cases() + more_cases()
    return screen_cases()


def show_progress(text):
    """Write over the last line of stderr; an empty text wipes it."""
    print(f"\r{'':<70}\r{text}", end="", file=sys.stderr, flush=True)


def print_notes(rows, out):
    """What the marks of these rows mean, and how a missing column is had."""
    print("\nmilliseconds; x: times faster than upstream; -: no such part, or no C in it", file=out)
    if any(row["case"].endswith("*") for row in rows):
        print("*  upstream's side is a script that its package lacks, re-created here", file=out)
    if any(row["scaled"] for row in rows):
        print("~  measured on fewer items, and scaled", file=out)
    if any(row["peer"] for row in rows):
        print("() not upstream's, but of the peer that the case names", file=out)
    if load("C") is None:
        print("To fill the column C: python setup.py build_ext --inplace", file=out)
    if load("upstream") is None:
        print("To fill the column upstream: python -m pip install megatron-core==0.16.1", file=out)


def write_json(values, path):
    """To a file, or to stdout."""
    text = json.dumps(values, indent=1) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        pathlib.Path(path).write_text(text, encoding="utf-8")


# ==============================================================================
# 6. A billion documents
# ==============================================================================
# Time and memory against size, of ours alone: upstream holds several int64 for each document, and
# runs out of memory.  A corpus is made, indexed in a fresh process for each number of epochs, and
# removed.

SCALE_COLUMNS = [  # title, width, digits after the point
    ("documents", 13, 0),
    ("epochs", 6, 0),
    ("samples", 13, 0),
    ("open s", 6, 2),
    ("build s", 7, 2),
    ("ns/document", 11, 1),  # of each epoch
    ("batch s", 7, 2),  # the first one
    ("hit s", 6, 2),  # to build once more, with the cache
    ("own GiB", 7, 2),  # without the pages of mapped files, which the system can take back
    ("peak GiB", 8, 2),  # with them
]


def billion(most):
    """Print the table of sizes -> 0."""
    print_machine(machine(), sys.stdout)
    titles = [title.rjust(width) for title, width, _ in SCALE_COLUMNS]
    rules = ["-" * (width - 1) + ":" for _, width, _ in SCALE_COLUMNS]
    print(f"\n| {' | '.join(titles)} |\n| {' | '.join(rules)} |")
    sizes = [size for size in (10**6, 10**7, 10**8, 10**9) if size < most]
    for documents in [*sizes, most]:
        prefix = corpus(documents, None)
        for epochs in (1, 3, 10):
            show_progress(f"{documents:,} documents, {epochs} epochs")
            needed = 8 * documents * (epochs + 1)
            if needed > memory("MemAvailable", "meminfo"):
                cells = [f"{documents:13,}", f"{epochs:6}", f"too large: {needed / 2**30:,.0f} GiB"]
            else:
                row = run_in_fresh_process(measure_scale, prefix, epochs)
                cells = [f"{row[title]:{width},.{n}f}" for title, width, n in SCALE_COLUMNS]
            show_progress("")
            print(f"| {' | '.join(cells)} |", flush=True)
        os.unlink(f"{prefix}.bin")
        os.unlink(f"{prefix}.idx")
    return 0


def run_in_fresh_process(function, prefix, epochs):
    """Call it in a process that has not used any memory yet."""
    name = "C" if load("C") else "Python"
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, name, prefix, epochs, fresh_folder()).result()


def measure_scale(name, prefix, epochs, cache):
    """Build the dataset of a corpus, with its cache, and use it -> {title of a column: value}."""
    mm = load(name)
    watch = MemoryWatch()
    row = {"epochs": epochs}
    start = time.perf_counter()
    low = mm.IndexedDataset(prefix)
    row["open s"] = time.perf_counter() - start
    row["documents"] = len(low)
    num_tokens = int(low.sequence_lengths.sum(dtype=np.int64))
    row["samples"] = (num_tokens * epochs - 1) // 2048
    config = config_of(mm, [prefix], 2048, cache)

    start = time.perf_counter()
    dataset = build_blend(mm, config, row["samples"])
    row["build s"] = time.perf_counter() - start
    row["ns/document"] = 1e9 * row["build s"] / row["documents"] / epochs
    row["own GiB"] = watch.most / 2**30
    row["peak GiB"] = memory("VmHWM") / 2**30

    start = time.perf_counter()
    next(iter(mm.build_pretraining_data_loader(dataset, 0, micro_batch_size=8)))
    row["batch s"] = time.perf_counter() - start

    start = time.perf_counter()
    build_blend(mm, config, row["samples"])
    row["hit s"] = time.perf_counter() - start
    return row


def memory(key, file="self/status"):
    """A line of a file in /proc, in bytes; nan where there is none.

    VmHWM is the most that was resident, RssAnon what is resident now and is no mapped file.
    """
    path = pathlib.Path("/proc", file)
    if not path.exists():
        return math.nan
    found = re.search(rf"{key}:\s+(\d+) kB", path.read_text(encoding="utf-8"))
    return 1024 * int(found[1]) if found else math.nan


class MemoryWatch:
    """Looks at RssAnon again and again, of which Linux keeps no maximum."""

    def __init__(self):
        self.most = 0  # bytes more than at the beginning
        self._first = memory("RssAnon")
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self):
        while True:
            self.most = max(self.most, memory("RssAnon") - self._first)
            time.sleep(0.01)


# ==============================================================================
# 7. Object storage
# ==============================================================================
# Samples from a server on this machine that speaks as much of S3 as it takes to read objects, and
# counts requests and bytes.  It is a process of its own.  No network lies between, so what a
# request costs elsewhere, tens of milliseconds, comes on top: look at the counts too.
#
# The corpus is larger than two of upstream's blocks, because upstream keeps the last block.


@dataclasses.dataclass
class StorageCase:
    """A row of the table of object storage."""

    title: str
    name: str  # of the competitor
    n: int  # samples
    block_bytes: int = 0
    threads: int = 1


def storage_cases():
    """The rows."""
    block = 256 << 20
    return [
        StorageCase("upstream, blocks of 256 MiB", "upstream", 8, block),
        StorageCase("exact ranges", "Python", 400),
        StorageCase("exact ranges", "Python", 400, 0, 4),
        StorageCase("blocks of 1 MiB", "Python", 200, 1 << 20),
        StorageCase("blocks of 1 MiB", "Python", 200, 1 << 20, 4),
        StorageCase("blocks of 256 MiB", "Python", 8, block),
    ]


class StorageHandler(http.server.BaseHTTPRequestHandler):
    """Answers GET and HEAD of /bucket/<file of the folder>, and /counts."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16
    counts: typing.ClassVar = {"requests": 0, "bytes": 0}
    lock = threading.Lock()
    folder = None

    def log_message(self, *details):
        """Nothing."""

    def do_GET(self):
        """Send an object, or a range of it."""
        if self.path == "/counts":
            self.send_content(200, json.dumps(self.counts).encode())
            return
        path = os.path.join(self.folder, self.path.rpartition("/")[2])
        content = memoryview(np.memmap(path, np.uint8, "r"))
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            end = int(wanted[2]) + 1 if wanted[2] else len(content)
            content = content[int(wanted[1]) : end]
        with self.lock:
            self.counts["requests"] += 1
            if self.command == "GET":
                self.counts["bytes"] += len(content)
        self.send_content(206 if wanted else 200, content)

    do_HEAD = do_GET

    def send_content(self, status, content):
        """Send an answer."""
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"0"')
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def serve_folder(folder, pipe):
    """What the process of the server does."""
    StorageHandler.folder = folder
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), StorageHandler)
    pipe.send(f"http://127.0.0.1:{server.server_port}")
    server.serve_forever()


@functools.cache
def storage_server(folder):
    """The URL of a server of this folder, which ends with this process."""
    mine, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    context.Process(target=serve_folder, args=(folder, theirs), daemon=True).start()
    return mine.recv()


def counts_of(url):
    """Requests and bytes so far."""
    with urllib.request.urlopen(f"{url}/counts") as answer:
        return json.load(answer)


def remote_dataset(case, prefix):
    """The samples of a pair on the server, whose indices were built before."""
    mm = load(case.name)
    cache = os.path.join(home(), "cache")
    config = config_of(mm, [prefix], 2048, cache)
    storage = mm.ObjectStorageConfig(os.path.join(home(), f"idx-{case.name}"), case.block_bytes)
    low = mm.IndexedDataset(prefix, mmap=False, object_storage_config=storage)
    documents = np.arange(len(low), dtype=np.int32)
    return mm.GPTDataset(low, prefix, documents, None, mm.Split.train, config)


def read_batch(dataset, indices):
    """As torch's DataLoader reads a batch."""
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    return [dataset[i] for i in indices]


def measure_storage(case, prefix, url, wanted):
    """The cells of a row; the samples must be those of the local pair."""
    dataset = remote_dataset(case, prefix)
    batches = [list(range(k, k + 8)) for k in range(0, case.n, 8)]
    before = counts_of(url)
    started = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(case.threads) as pool:
        found = list(pool.map(read_batch, itertools.repeat(dataset), batches))
    seconds = time.perf_counter() - started
    after = counts_of(url)
    tokens = [sample["tokens"] for samples in found for sample in samples]
    if not is_same(tokens, [wanted[k]["tokens"] for k in range(case.n)]):
        return [case.title, str(case.threads), "differs", "-", "-"]
    requests = (after["requests"] - before["requests"]) / case.n
    num_bytes = (after["bytes"] - before["bytes"]) / case.n
    speed = format_number(case.n / seconds)
    return [case.title, str(case.threads), speed, format_number(requests), f"{num_bytes:,.0f}"]


def print_storage(out):
    """Print the table -> whether all samples were right."""
    if importlib.util.find_spec("s3fs") is None:
        print("\nno rows of object storage: pip install s3fs", file=out)
        return True
    local = corpus(600_000)
    url = storage_server(os.path.dirname(local))
    environment = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
    environment |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    is_right = True
    with unittest.mock.patch.dict(os.environ, environment):
        wanted = gpt_dataset(load("Python"), local, 2048, os.path.join(home(), "cache"))
        print("\nObject storage, S=2048, batches of 8, 600 MB, a server on this machine", file=out)
        print("| reads | threads | samples/s | requests a sample | bytes a sample |", file=out)
        print("|---|--:|--:|--:|--:|", file=out)
        for case in storage_cases():
            is_missing = load(case.name) is None or importlib.util.find_spec("boto3") is None
            if case.name == "upstream" and is_missing:
                continue
            prefix = f"s3://bucket/{os.path.basename(local)}"
            cells = measure_storage(case, prefix, url, wanted)
            is_right = is_right and "differs" not in cells
            print(f"| {' | '.join(cells)} |", file=out, flush=True)
    return is_right


# ==============================================================================
# 8. The same under pytest-benchmark
# ==============================================================================


def pytest_generate_tests(metafunc):
    """One test for each row of the screen and each competitor that is there."""
    import pytest

    tests = []
    for case in screen_cases():
        for name in case.competitors():
            clock = Clock()
            mark = pytest.mark.benchmark(group=case.title, timer=clock.read)
            label = f"{case.title}, {name}"
            tests.append(pytest.param(case, name, clock, id=label, marks=mark))
    metafunc.parametrize("case, name, clock", tests)


def test_case(case, name, clock, benchmark):
    """Equal to the first competitor that is there; then timed, by the clock of the case."""
    first = case.competitors()[0]
    assert find_different(case, [first, name]) == []
    items = case.items(name)
    benchmark.extra_info["items"] = items
    benchmark.pedantic(case.run, args=(name, items, clock), rounds=3)


if __name__ == "__main__":
    sys.exit(main())
