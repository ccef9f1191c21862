#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""How fast is it?  A table of megatron-core 0.16.1 ("upstream"), our Python and our C.

    python bench.py                 the rows that tell most, on one screen, in under a minute
    python bench.py --full          all rows, in a few minutes
    python bench.py --only blend    those of all rows whose case matches a regular expression
    python bench.py --json FILE     every single time too; "-" is stdout, the table goes to stderr
    python bench.py --billion       time and memory against size, up to a billion documents
    pytest bench.py                 the rows of the screen in pytest-benchmark, to compare and keep

Inputs come from fixed seeds, and lie in a temporary folder (TMPDIR).  For each row the competitors
run once without a clock, which warms up files and memory, and their results are compared; one that
differs gets no time.  Then they take turns, A B C A B C ..., so that a slow moment of the machine
hits all alike.  Shown are the medians, in milliseconds.

To add a row, write a function in section 3 and a line in section 4.
"""

import argparse
import atexit
import concurrent.futures
import dataclasses
import datetime
import functools
import gc
import importlib.metadata
import importlib.util
import itertools
import json
import logging
import multiprocessing
import os
import pathlib
import platform
import re
import resource
import shutil
import statistics
import struct
import sys
import tempfile
import time
import tracemalloc
import types
import typing
import warnings

import numpy as np
import torch
import torch.distributed
import torch.utils.data

SEED = 1234
EOD = 50256

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(1)  # torchrun does so too; the threads of a busy machine wait long

# -- 1. The competitors ----------------------------------------------------------------------------
# Each is a module with upstream's public names, so that a case runs the same lines on all three.

NAMES = ("upstream", "Python", "C")
NO_C = ("upstream", "Python")  # for rows in which no C kernel runs
OURS = ("Python", "C")  # for what upstream does not have


@functools.cache
def load(name):
    """The module of a competitor, ours as a private copy; None where it is missing."""
    if name == "upstream":
        return load_upstream()
    path = pathlib.Path(__file__).resolve().parent / "megatron_min.py"
    spec = importlib.util.spec_from_file_location(f"megatron_min_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    os.environ["MEGATRON_MIN_C"] = "1" if name == "C" else "0"
    try:
        spec.loader.exec_module(module)
    except ImportError:
        return None
    return module


def load_upstream():
    """The data path of megatron-core in one module, and re-creations of what it lacks."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.core.datasets import blended_megatron_dataset_builder as builder
            from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset, utils
    except ImportError:
        return None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    upstream = types.ModuleType("upstream")
    for part in (utils, helpers, indexed_dataset, gpt_dataset, builder):
        upstream.__dict__.update(part.__dict__)
    upstream.__name__ = "upstream"
    upstream.shuffle = shuffle_with_numpy
    upstream.get_batch_on_this_cp_rank = upstream_cp_batch
    upstream.build_pretraining_data_loader = recreated_data_loader
    upstream.merge = recreated_merge
    upstream.ParallelGroups = dict  # no groups: the next function broadcasts over all ranks
    upstream.get_batch_on_this_tp_rank = recreated_tp_batch
    upstream.DistributedDataParallel = TorchDDP
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


def recreated_tp_batch(data_iterator, groups, *, micro_batch_size, sequence_length, **options):
    """How the training script hands a batch to the tensor-parallel ranks: five broadcasts."""
    if data_iterator is not None:
        batch = next(data_iterator)
    else:
        like = parallel_batch(sequence_length, with_mask=True)
        batch = {key: torch.empty_like(tensor) for key, tensor in like.items()}
    for tensor in batch.values():
        torch.distributed.broadcast(tensor, 0)
    return batch


class TorchDDP(torch.nn.parallel.DistributedDataParallel):
    """torch's class with the names of ours; upstream's needs a GPU."""

    def __init__(self, module, bucket_size, overlap_grad_reduce):
        super().__init__(module, bucket_cap_mb=4 * bucket_size / 2**20)

    def zero_grad_buffer(self):
        self.zero_grad()

    def finish_grad_sync(self):
        """Nothing is left to do: backward() has waited."""


# -- 2. Clock, files, datasets, processes ----------------------------------------------------------


class Clock:
    """A stopwatch that runs only inside its with block; the ranks of a job start together."""

    def __init__(self):
        self.seconds = 0.0
        self._started = None

    def __enter__(self):
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self._started = time.perf_counter()

    def __exit__(self, kind, error, traceback):
        self.seconds += time.perf_counter() - self._started


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
def random_documents(n):
    """Tokens in each document, 1 to 999; and the documents in random order; int32."""
    rng = np.random.default_rng(SEED)
    return rng.integers(1, 1000, n, dtype=np.int32), rng.permutation(n).astype(np.int32)


@functools.cache
def corpus(documents, seed=SEED, hole=False):
    """Write a pair of random uint16 tokens -> its prefix.

    A billion documents need little disk and memory: a hole in the .bin takes the place of tokens,
    and the lengths repeat after a million documents.
    """
    prefix = os.path.join(home(), f"corpus-{documents}-{seed}-{hole}")
    lengths, _ = random_documents(min(documents, 10**6))
    ends = np.cumsum(lengths, dtype=np.int64)
    repeats = documents // len(lengths)
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, documents, documents + 1))
        for _ in range(repeats):
            lengths.tofile(file)
        for k in range(repeats):
            (2 * (k * ends[-1] + ends - lengths)).tofile(file)  # pointers, in bytes
        for k in range(repeats):
            np.arange(k * len(lengths), (k + 1) * len(lengths)).tofile(file)
        file.write(struct.pack("<q", documents))
    with open(f"{prefix}.bin", "wb") as file:
        if hole:
            file.truncate(2 * repeats * ends[-1])
        else:
            tokens = np.random.default_rng(seed).integers(0, EOD, ends[-1], dtype=np.uint16)
            tokens[ends - 1] = EOD
            tokens.tofile(file)
    return prefix


class Tokenizer:
    """As much of a tokenizer as a dataset asks for."""

    vocab_size = EOD + 1
    eod = EOD
    unique_identifiers = {"class": "bench.Tokenizer"}


FLAGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask")


def build_dataset(mm, prefixes, S, cache, samples=None, **options):
    """The training dataset of whole corpora, as the builder makes it; samples None: one epoch."""
    config = mm.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=S,
        blend_per_split=[(prefixes, None), None, None],
        path_to_cache=cache,
        tokenizer=Tokenizer(),
        **(dict.fromkeys(FLAGS, False) | options),
    )
    sizes = [samples, None, None]
    builder = mm.BlendedMegatronDatasetBuilder(mm.GPTDataset, sizes, is_built_here, config)
    return builder.build()[0]


def is_built_here():
    """For the builder: this process builds the datasets."""
    return True


@functools.lru_cache(maxsize=3)
def dataset_to_read(mm, S, **options):
    """100,000 documents to read from; the competitors share the cache, which the first writes."""
    return build_dataset(mm, [corpus(100_000)], S, os.path.join(home(), "cache"), **options)


def indices_of(dataset):
    """The three index arrays of a GPTDataset."""
    return [dataset.document_index[:], dataset.sample_index[:], dataset.shuffle_index[:]]


def run_in_fresh_process(function, *arguments):
    """Call it in a process that has imported and allocated nothing yet."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return pool.submit(function, *arguments).result()


@functools.cache
def two_ranks():
    """Start the two processes of a job, once.  (A fork would copy locked locks.)"""
    context = multiprocessing.get_context("spawn")
    store = f"file://{home()}/store"
    pools = []
    for rank in range(2):
        pool = concurrent.futures.ProcessPoolExecutor(1, context, join_job, (store, rank))
        atexit.register(pool.shutdown)
        pools.append(pool)
    return pools


def join_job(store, rank):
    """What each of the two processes does first."""
    torch.set_num_threads(1)
    timeout = datetime.timedelta(minutes=10)
    torch.distributed.init_process_group("gloo", store, timeout, world_size=2, rank=rank)


# -- 3. The cases ----------------------------------------------------------------------------------
# A case is a function of a competitor, a clock, a number of items, and options:
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


def sample_index(mm, clock, n, S):
    """build_sample_idx: one epoch of documents in random order."""
    sizes, order = random_documents(n)
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
    """The builder, for one epoch of a corpus; its cache is written to an empty folder."""
    prefix = corpus(n, hole=True)
    cache = fresh_folder()
    with clock:
        dataset = build_dataset(mm, [prefix], 2048, cache)
    return [indices_of(dataset), written_files()]


def build_epochs(mm, clock, n, epochs, **options):
    """The builder, for several epochs, n documents in all."""
    prefix = corpus(n // epochs, hole=True)
    cache = fresh_folder()
    low = mm.IndexedDataset(prefix)  # upstream's lengths do not outlive it
    num_tokens = int(low.sequence_lengths.sum(dtype=np.int64))
    num_samples = num_tokens * epochs // 2048 - 1
    with clock:
        dataset = build_dataset(mm, [prefix], 2048, cache, num_samples, **options)
    return [indices_of(dataset), written_files()]


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


def cache_hit(mm, clock, n, **options):
    """The builder, with a cache that is there: all open the same one, which our Python wrote."""
    prefix = corpus(n, hole=True)
    cache = os.path.join(home(), "hit")
    build_dataset(load("Python"), [prefix], 2048, cache, fast_cache_load=True)
    with clock:
        dataset = build_dataset(mm, [prefix], 2048, cache, **options)
    return indices_of(dataset)


def build_four(mm, clock, n):
    """The builder, in four threads: 90 % of an epoch of four corpora, their caches beside them."""
    folder = fresh_folder()
    prefixes = [os.path.join(folder, name) for name in "abcd"]
    for prefix in prefixes:
        os.symlink(f"{corpus(n // 4, hole=True)}.bin", f"{prefix}.bin")
        os.symlink(f"{corpus(n // 4, hole=True)}.idx", f"{prefix}.idx")
    num_samples = int(0.9 * n * 500 / 2048)
    threads = {"num_dataset_builder_threads": 4}
    with clock:
        dataset = build_dataset(mm, prefixes, 2048, None, num_samples, **threads)
    parts = [indices_of(part) for part in dataset.datasets]
    return [dataset.dataset_index, dataset.dataset_sample_index, parts]


def add_documents(mm, clock, n, convert, by_item=False):
    """Documents that are added one by one, as lists (what tokenizers give), arrays or tensors."""
    rng = np.random.default_rng(SEED)
    documents = []
    for length in random_documents(1000)[0]:
        documents.append(convert(rng.integers(0, EOD, length, dtype=np.int32)))
    prefix = os.path.join(fresh_folder(), "pair")
    builder = mm.IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    with clock:
        for tokens in itertools.islice(itertools.cycle(documents), n):
            if by_item:
                builder.add_item(tokens)
                builder.end_document()
            else:
                builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return written_files()


def merge(mm, clock, n):
    """merge, of two pairs of n / 2 documents each."""
    prefixes = [corpus(n // 2, seed) for seed in (1, 2)]
    output = os.path.join(fresh_folder(), "pair")
    with clock:
        mm.merge(prefixes, output)
    return written_files()


@functools.cache
def json_lines(n):
    """Write n pieces of Python's own library, of 2 kB each, as JSON lines -> the path."""
    modules = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:150]
    code = "".join(path.read_text("utf-8", "replace") for path in modules)
    pieces = [code[i : i + 2000] for i in range(0, len(code), 2000)]
    path = os.path.join(home(), f"text-{n}.jsonl")
    with open(path, "w", encoding="utf-8") as file:
        for text in itertools.islice(itertools.cycle(pieces), n):
            file.write(json.dumps({"text": text}) + "\n")
    return path


def preprocess(mm, clock, n):
    """preprocess in one process, into bytes."""
    path = json_lines(n)
    output = os.path.join(fresh_folder(), "pair")
    with clock:
        mm.preprocess(path, output, append_eod=True)
    return written_files()


@functools.cache
def trained_tokenizer():
    """Train a byte-level BPE of 8,000 ids with the package tokenizers -> its tokenizer.json."""
    import tokenizers

    # Read when the library first uses several threads, which must not be before a worker is forked.
    os.environ["RAYON_NUM_THREADS"] = "2"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    texts = [json.loads(line)["text"] for line in open(json_lines(500), encoding="utf-8")]
    special = ["<|endoftext|>"]
    tokenizer.train_from_iterator(texts, 8000, special_tokens=special, show_progress=False)
    path = os.path.join(home(), "tokenizer.json")
    tokenizer.save(path)
    return path


def preprocess_trained(mm, clock, n, workers):
    """preprocess with a tokenizer.json -> the number of tokens; upstream: the library alone."""
    path = json_lines(n)
    tokenizer_path = trained_tokenizer()
    if mm.__name__ == "upstream":
        return library_alone(clock, n, workers)
    tokenizer = mm.HuggingFaceTokenizer(tokenizer_path)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    output = os.path.join(fresh_folder(), "pair")
    with clock:
        prefixes = mm.preprocess(path, output, tokenizer, workers=workers)
    return mm.IndexedDataset(prefixes["text"]).num_tokens


def library_alone(clock, n, workers):
    """The package tokenizers on the same file, in threads of its own -> the number of tokens."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(trained_tokenizer())
    os.environ["TOKENIZERS_PARALLELISM"] = "false" if workers == 1 else "true"
    num_tokens = 0
    with clock, open(json_lines(n), "rb") as file:
        texts = [json.loads(line)["text"] for line in file]
        for first in range(0, n, 500):
            for encoding in tokenizer.encode_batch_fast(texts[first : first + 500]):
                num_tokens += len(encoding.ids)
    return num_tokens


def chat(mm, clock, n):
    """SFTDataset: n conversations of a turn each, tokenized as bytes, S=2048."""
    path = os.path.join(home(), f"chat-{n}.jsonl")
    if not os.path.exists(path):
        with open(path, "w", encoding="utf-8") as file, open(json_lines(n), "rb") as texts:
            for line in texts:
                text = json.loads(line)["text"]
                question = {"role": "user", "content": text[:1000]}
                answer = {"role": "assistant", "content": text[1000:]}
                file.write(json.dumps({"messages": [question, answer]}) + "\n")
    config = mm.GPTDatasetConfig(
        SEED,
        2048,
        blend=([path], None),
        split="1",
        tokenizer=mm.ByteTokenizer(),
        create_attention_mask=False,
    )
    sizes = [n, 0, 0]
    dataset = mm.BlendedMegatronDatasetBuilder(mm.SFTDataset, sizes, is_built_here, config).build()[
        0
    ]
    with clock:
        samples = [dataset[i] for i in range(n)]
    return [sample["labels"].numpy() for sample in samples]


def first_batch(mm, clock, n):
    """A new process that imports all, builds a dataset of n documents, and reads a batch."""
    name = mm.__name__.removeprefix("megatron_min_")
    arguments = (name, corpus(n), fresh_folder())
    with clock:
        return run_in_fresh_process(first_tokens, *arguments)


def first_tokens(name, prefix, cache):
    """What the process does."""
    mm = load(name)
    dataset = build_dataset(mm, [prefix], 2048, cache, 1000)
    batches = mm.build_pretraining_data_loader(dataset, 0, micro_batch_size=8, num_workers=0)
    return next(iter(batches))["tokens"].numpy()


@functools.cache
def parallel_batch(S, with_mask=False):
    """A micro-batch of 8 rows, as a loader gives it."""
    words = torch.from_numpy(np.random.default_rng(SEED).integers(0, EOD, (8, S + 1)))
    batch = {
        "tokens": words[:, :-1].contiguous(),
        "labels": words[:, 1:].contiguous(),
        "loss_mask": torch.ones(8, S),
        "position_ids": torch.arange(S).repeat(8, 1),
    }
    if with_mask:
        batch["attention_mask"] = torch.ones(S, S, dtype=torch.bool).triu(1).repeat(8, 1, 1, 1)
    return batch


def tp_batch(mm, clock, n, S):
    """get_batch_on_this_tp_rank: rank 0 has batches, and gives them to rank 1."""
    groups = mm.ParallelGroups(tensor=2)
    batches = None
    if torch.distributed.get_rank() == 0:
        batches = itertools.repeat(parallel_batch(S, with_mask=True))
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
    torch.manual_seed(SEED)  # the same layers on all ranks; their inputs differ
    layers = [torch.nn.Linear(512, 512, bias=False) for _ in range(8)]
    inputs = torch.randn(64, 512) + torch.distributed.get_rank()
    model = torch.nn.Sequential(*layers)
    model = mm.DistributedDataParallel(model, bucket_size=2**19, overlap_grad_reduce=True)
    with clock:
        for _ in range(n):
            model.zero_grad_buffer()
            model(inputs).square().sum().backward()
            model.finish_grad_sync()
    return [parameter.grad.numpy() for parameter in model.parameters()]


# -- 4. The rows -----------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """A row of the table."""

    title: str  # ends in "*" where upstream's side is not in its package
    function: typing.Callable  # of section 3
    n: int  # how many items the function is given
    unit: str  # what these are
    names: tuple = NAMES  # the competitors
    options: dict = dataclasses.field(default_factory=dict)  # more arguments of the function
    ranks: int = 1  # 2: the function runs in both processes of a job
    seconds: float = 0.0  # of all runs so far

    def competitors(self):
        """The names of those that are there."""
        return [name for name in self.names if load(name) is not None]

    def run(self, name):
        """Run a competitor -> the seconds, and its result; a list of results on two ranks."""
        if self.ranks == 1:
            seconds, result = self.run_here(name)
        else:
            futures = [pool.submit(self.run_here, name) for pool in two_ranks()]
            answers = [future.result() for future in futures]
            seconds = max(answer[0] for answer in answers)  # the slower one counts
            result = [answer[1] for answer in answers]
        self.seconds += seconds
        return seconds, result

    def run_here(self, name):
        """The same, in this process alone."""
        clock = Clock()
        result = self.function(load(name), clock, self.n, **self.options)
        return clock.seconds, result

    def read_clock(self):
        """The seconds of all runs so far.  For pytest-benchmark this is the time of day."""
        return self.seconds


RESETS = {"reset_position_ids": True, "eod_mask_loss": True}
DENSE = {"reset_attention_mask": True, "create_attention_mask": True, **RESETS}
PACKED = {"inter_document_masking": True, "eod_mask_loss": True}  # not in upstream 0.16.1
STABLE = {"epochs": 2, "stable_order": True}
TRUST = {"fast_cache_load": True}
LISTS = {"convert": np.ndarray.tolist}
ITEM_LISTS = {"convert": np.ndarray.tolist, "by_item": True}  # upstream takes tensors only
ITEM_TENSORS = {"convert": torch.from_numpy, "by_item": True}

SCREEN = [  # the rows that tell most
    Case("dataset[i], S=512", samples, 4000, "samples", NAMES, {"S": 512}),
    Case("dataset[i], S=2048", samples, 4000, "samples", NAMES, {"S": 2048}),
    Case("dataset[i], S=8192", samples, 4000, "samples", NAMES, {"S": 8192}),
    Case("loader, S=2048 *", loader, 4000, "samples"),
    Case("loader, num_workers=2 *", loader, 2000, "samples", NAMES, {"num_workers": 2}),
    Case("loader, resets *", loader, 4000, "samples", NAMES, RESETS),
    Case("loader, resets, dense mask *", loader, 64, "samples", NAMES, DENSE),
    Case("sample index, S=2048", sample_index, 10**7, "documents", NAMES, {"S": 2048}),
    Case("shuffle", shuffle, 10**7, "int32"),
    Case("blend, 16 datasets", blend, 100_000, "samples", NAMES, {"datasets": 16}),
    Case("blend, 1,024 datasets", blend, 100_000, "samples", NAMES, {"datasets": 1024}),
    Case("build, new cache, S=2048", build, 10**7, "documents"),
    Case("add_document, arrays", add_documents, 20_000, "documents", NO_C, {"convert": np.asarray}),
    Case("tp batch, S=512, mask *", tp_batch, 100, "batches", NO_C, {"S": 512}, ranks=2),
]

MORE = [  # with --full
    Case("loader, cu_seqlens", loader, 4000, "samples", OURS, PACKED),
    Case("sample index, S=128", sample_index, 10**7, "documents", NAMES, {"S": 128}),
    Case("sample index, S=8192", sample_index, 10**7, "documents", NAMES, {"S": 8192}),
    Case("blend, 4 datasets", blend, 100_000, "samples", NAMES, {"datasets": 4}),
    Case("blend, 64 datasets", blend, 100_000, "samples", NAMES, {"datasets": 64}),
    Case("blend, 256 datasets", blend, 100_000, "samples", NAMES, {"datasets": 256}),
    Case("blend, 4,096 datasets", blend, 100_000, "samples", NAMES, {"datasets": 4096}),
    Case("blend, 16 datasets, 4 phases", phases, 100_000, "samples", OURS, {"datasets": 16}),
    Case("build, 2 epochs", build_epochs, 10**7, "documents", NAMES, {"epochs": 2}),
    Case("stable_order, 2 epochs", build_epochs, 10**7, "documents", OURS, STABLE),
    Case("cache hit, S=2048", cache_hit, 10**7, "documents", NO_C),
    Case("cache hit, fast_cache_load", cache_hit, 10**7, "documents", NO_C, TRUST),
    Case("builder, 4 corpora, threads", build_four, 10**6, "documents"),
    Case("add_document, lists", add_documents, 20_000, "documents", NO_C, LISTS),
    Case("add_item, tensors", add_documents, 20_000, "documents", NO_C, ITEM_TENSORS),
    Case("add_item, lists", add_documents, 20_000, "documents", ("Python",), ITEM_LISTS),
    Case("merge two pairs *", merge, 100_000, "documents", NO_C),
    Case("preprocess, bytes", preprocess, 10_000, "pages of 2 kB", ("Python",)),
    Case("preprocess, BPE (library) *", preprocess_trained, 1000, "pages", NO_C, {"workers": 1}),
    Case("the same, 2 workers *", preprocess_trained, 1000, "pages", NO_C, {"workers": 2}),
    Case("SFTDataset, S=2048", chat, 1000, "samples", ("Python",)),
    Case("import to first batch", first_batch, 100_000, "documents", NO_C),
    Case("cp batch, S=8192", cp_batch, 200, "batches", NO_C, {"S": 8192}, ranks=2),
    Case("DDP, upstream: torch's *", ddp_steps, 16, "steps", NO_C, ranks=2),
]

# -- 5. Measuring, and the table -------------------------------------------------------------------
# {title: alignment and width}
COLUMNS = {"case": "<28", "size": "<20"} | dict.fromkeys([*NAMES, "Python x", "C x"], ">8")


def measure(case, rounds):
    """Compare and time the competitors of a row -> what is known of it, for JSON.

    There are at least so many rounds, and more, up to 50, until a second is over.
    """
    names = case.competitors()
    different = find_different(case, names)
    times = {name: [] for name in names if name not in different}
    gc.collect()
    started = time.perf_counter()
    for number in range(1, 51):
        for name in times:
            seconds, _ = case.run(name)
            times[name].append(1e3 * seconds)
        if number >= rounds and time.perf_counter() - started > 1:
            break
    return {
        "case": case.title,
        "size": f"{case.n:,} {case.unit}",
        "different": different,
        "runs_ms": times,
        "median_ms": {name: statistics.median(times[name]) for name in times},
    }


def find_different(case, names):
    """Run all without a clock -> the names of those whose result is not that of the first."""
    different = []
    _, expected = case.run(names[0])
    for name in names[1:]:
        _, result = case.run(name)
        if not is_same(expected, result):
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


def print_line(cells, columns, out):
    """A line of a Markdown table, padded so that it reads well as text too."""
    padded = [format(cell, columns[title]) for title, cell in zip(columns, cells, strict=True)]
    print(f"| {' | '.join(padded)} |", file=out, flush=True)


def print_head(columns, out):
    """The titles, and the line under them: dashes, and a colon where numbers are to the right."""
    print_line(columns, columns, out)
    ends = {"<": "-", ">": ":"}
    rules = [format(ends[alignment[0]], f"-{alignment}") for alignment in columns.values()]
    print_line(rules, columns, out)


def cells_of(row):
    """The cells of a row that was measured."""
    medians = row["median_ms"]
    cells = [row["case"], row["size"]]
    for name in NAMES:
        if name in row["different"]:
            cells.append("differs")
        else:
            cells.append(format_number(medians.get(name)))
    for name in ("Python", "C"):
        if name in medians and "upstream" in medians:
            cells.append(format_number(medians["upstream"] / medians[name]) + "x")
        else:
            cells.append("-")
    return cells


def format_number(value):
    """A whole number, or one with two digits after the point, one, or none; None: a dash."""
    if value is None:
        return "-"
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    if value < 10:
        return f"{value:.2f}"
    return f"{value:.1f}"


def machine():
    """What the numbers depend on, as a dict of strings."""
    cpuinfo = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
    found = re.search(r"model name\s*: (.*)", cpuinfo)
    upstream = "not installed"
    if load("upstream"):
        upstream = importlib.metadata.version("megatron-core")
    return {
        "machine": f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "torch": f"{torch.__version__}, threads {torch.get_num_threads()}",
        "megatron-core": upstream,
        "megatron-min": f"{load('Python').__version__}, C {'built' if load('C') else 'missing'}",
        "date": str(datetime.date.today()),
    }


def main():
    """Print the table -> 0, or 1 if a result differs."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="all rows, in a few minutes")
    parser.add_argument("--only", metavar="REGEX", help="those of all rows whose case matches")
    parser.add_argument("--json", metavar="FILE", help="write every time as JSON; -: to stdout")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs, at least (%(default)s)")
    parser.add_argument("--billion", action="store_true", help="time and memory against size")
    options = parser.parse_args()
    out = sys.stderr if options.json == "-" else sys.stdout
    facts = machine()
    for number, (key, value) in enumerate(facts.items()):
        print(f"{key} {value}", end="\n" if number in (2, 6) else "; ", file=out)
    print(file=out)
    if options.billion:
        return print_scale()
    cases = SCREEN
    if options.full or options.only:
        cases = [case for case in SCREEN + MORE if re.search(options.only or "", case.title)]
    rows = measure_all(cases, options.rounds, out)
    if options.json:
        text = json.dumps({**facts, "rows": rows}, indent=1)
        path = "/dev/stdout" if options.json == "-" else options.json
        pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
    return int(any(row["different"] for row in rows))


def measure_all(cases, rounds, out):
    """Print a line for each of these rows as soon as it is known -> all that is known."""
    print_head(COLUMNS, out)
    rows = []
    for number, case in enumerate(cases, 1):
        show_progress(f"row {number} of {len(cases)}: {case.title}")
        row = measure(case, rounds)
        show_progress("")
        print_line(cells_of(row), COLUMNS, out)
        rows.append(row)
    print("\nmilliseconds; x: times faster than upstream; -: no such part, or no C in it", file=out)
    print("*: upstream's is not in its package: its script re-created, or what is named", file=out)
    if load("C") is None:
        print("To fill the column C: python setup.py build_ext --inplace", file=out)
    if load("upstream") is None:
        print("To fill the column upstream: python -m pip install megatron-core==0.16.1", file=out)
    return rows


def show_progress(text):
    """Write over the last line of stderr; an empty text wipes it."""
    print(f"\r{'':<70}\r{text}", end="", file=sys.stderr, flush=True)


# -- 6. A billion documents ------------------------------------------------------------------------
# Time and memory against size, of ours alone: upstream holds several int64 for each document, and
# runs out of memory.  A corpus is made, indexed in a fresh process for each number of epochs, and
# removed.

TITLES = ["million documents", "epochs", "open s", "build s", "ns per document and epoch"]
TITLES += ["first batch s", "cache hit s", "own GiB", "peak GiB"]
SCALE = {title: f">{len(title)}" for title in TITLES}


def print_scale():
    """Print the table of sizes -> 0."""
    print_head(SCALE, sys.stdout)
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for documents in (10**6, 10**7, 10**8, 10**9):
        prefix = corpus(documents, hole=True)
        for epochs in (1, 3, 10):
            show_progress(f"{documents:,} documents, {epochs} epochs")
            row = {"million documents": documents // 10**6, "epochs": epochs}
            if 8 * documents * (epochs + 1) < 0.9 * physical:
                row |= run_in_fresh_process(measure_scale, prefix, fresh_folder(), epochs)
            show_progress("")
            print_line([format_number(row.get(title)) for title in SCALE], SCALE, sys.stdout)
        os.unlink(f"{prefix}.bin")
        os.unlink(f"{prefix}.idx")
    print("\n-: would need more memory than there is")
    return 0


def measure_scale(prefix, cache, epochs):
    """Build the dataset of a corpus, with its cache, and use it -> {title of a column: value}."""
    mm = load("C") or load("Python")
    row = {}
    start = time.perf_counter()
    low = mm.IndexedDataset(prefix)
    row["open s"] = time.perf_counter() - start
    num_samples = (int(low.sequence_lengths.sum(dtype=np.int64)) * epochs - 1) // 2048

    tracemalloc.start()
    start = time.perf_counter()
    dataset = build_dataset(mm, [prefix], 2048, cache, num_samples)
    row["build s"] = time.perf_counter() - start
    row["ns per document and epoch"] = 1e9 * row["build s"] / len(low) / epochs
    row["own GiB"] = tracemalloc.get_traced_memory()[1] / 2**30
    # with the pages of mapped files, which the system can take back
    row["peak GiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    start = time.perf_counter()
    next(iter(mm.build_pretraining_data_loader(dataset, 0, micro_batch_size=8)))
    row["first batch s"] = time.perf_counter() - start

    start = time.perf_counter()
    build_dataset(mm, [prefix], 2048, cache, num_samples)
    row["cache hit s"] = time.perf_counter() - start
    return row


# -- 7. The same under pytest-benchmark ------------------------------------------------------------


def pytest_generate_tests(metafunc):
    """One test for each row of the screen and each competitor that is there."""
    import pytest

    tests = []
    for case in SCREEN:
        mark = pytest.mark.benchmark(group=case.title, timer=case.read_clock)
        for name in case.competitors():
            tests.append(pytest.param(case, name, id=f"{case.title}, {name}", marks=mark))
    metafunc.parametrize("case, name", tests)


def test_case(case, name, benchmark):
    """Equal to the first competitor that is there; then timed, by the clock of the case."""
    assert find_different(case, [case.competitors()[0], name]) == []
    benchmark.extra_info["size"] = f"{case.n:,} {case.unit}"
    benchmark.pedantic(case.run, args=(name,), rounds=3)


if __name__ == "__main__":
    sys.exit(main())
