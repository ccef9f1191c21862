#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
# megatron_min.  Copyright (c) 2026 The megatron_min authors, MIT licence.  This notice stays with
# copies of the file.
"""Megatron-LM's GPT data path in one file: text to files to indices to resumable batches.

This module writes and reads the files that Megatron-LM trains on, and makes training batches of
them.  Its measure is the package megatron-core 0.16.1, called "upstream" here: for every input on
which upstream works as intended, this module makes the same bytes, that is the same .bin and .idx
files, index arrays, cache files, samples and batches, in the same order.

Part I is the text book.  Each of its sections opens with a question and a drawing, and its code is
the definition of what happens: plain, complete, and fast enough for many uses.  Part II is the
workshop: how files appear whole, how arrays are cached, how errors reach every rank, and how C
makes the loops of part I faster.  Part III is what people run from a shell.  The file needs nothing
but numpy and torch; _helpers.c is an optional accelerator with identical results.

Words       token        an integer that stands for a piece of text
            document     one text of the corpus, such as one line of JSON
            sequence     a run of tokens that the .idx file lists as one entry.  A document is
                         stored as one sequence, or as several, one for each of its sentences.
            corpus       a pair of files, .bin and .idx, that holds many sequences
            split        the part of a corpus that is for training, validation or testing
            epoch        one pass over all sequences of a split
            sample       S tokens that the model reads in one row, with labels and masks
            micro-batch  the samples that one rank reads at once
            blend        several corpora mixed by weights
            rank         one process of a training job; usually each rank has one GPU
Notation    S  tokens in a sample (sequence_length)     D  sequences in a split
            T  tokens in one epoch of a split           E  epochs over the split
            N  samples in a dataset                     x  1 if a sample has one token more, so that
                                                           its last input has a label, else 0
            "list -> tuple" in a docstring: the function takes a list and returns a tuple
Examples    read toy_corpus(): the three documents aaaa bbb cccccc, with S = 4

Contents
Part I, the path of a token
    1. The file pair              where on disk are the tokens of sequence i?
    2. Text to tokens             how do lines of JSON become a pair?
    3. Split, blend, config       which documents of which corpora, cut how?
    4. Three orders               in which order do documents and samples come?
    5. GPTDataset                 what are the tokens, labels and masks of sample k?
    6. BlendedDataset             which dataset, and which of its samples, is sample i of the blend?
    7. The builder                which datasets does a config mean, and who builds them first?
    8. Samplers and resume        which samples does rank r get at step t, and after a stop?
    9. Parallel batches           which part of a batch does each rank get?
    10. Gradients                 how do the data-parallel ranks come to have the same gradients?
Part II, the workshop
    11. Whole files               how does a file appear whole, or not at all?
    12. The index cache           when may arrays made earlier be used again?
    13. Token sources             how are tokens read from a mapping, a file, or object storage?
    14. Batches ahead             how is the next batch ready before it is asked for?
    15. One error for every rank  what do the others do when one rank fails?
    16. The C kernels             where is each loop made fast, and how is C switched on and off?
Part III, the tools
    17. Tokenizers                which tokenizers can a command use?
    18. Preprocessing             how is a big corpus tokenized, on all cores and many machines?
    19. Fine-tuning data          how does a conversation become a sample, at access?
    20. Audit                     which documents made this batch, and what will this blend do?
    21. The command line          how is all this run from a shell?
"""

import abc
import argparse
import array
import atexit
import bisect
import collections
import collections.abc
import concurrent.futures
import contextlib
import dataclasses
import datetime
import difflib
import enum
import errno
import fcntl
import fractions
import functools
import glob
import hashlib
import importlib
import io
import itertools
import json
import logging
import math
import multiprocessing
import numbers
import operator
import os
import pathlib
import pkgutil
import re
import secrets
import shlex
import shutil
import signal
import struct
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
import types
import typing
import warnings
import weakref
import zlib

try:
    import numpy as np
    import torch
    import torch.distributed
    import torch.utils.data
except ModuleNotFoundError as error:
    if error.name not in ("numpy", "torch"):  # something that these packages need
        raise
    sentence = f"megatron_min needs the package {error.name}: pip install {error.name}"
    if __name__ == "__main__":
        sys.exit(sentence)
    raise ModuleNotFoundError(sentence, name=error.name) from None

__version__ = "0.1.0"

__all__ = [
    "BlendTooLarge",
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "BlendedMegatronDatasetConfig",
    "Bucket",
    "ByteTokenizer",
    "DType",
    "DatasetFormatError",
    "DistributedDataParallel",
    "EpochPlan",
    "ExplainedSample",
    "FileTokens",
    "GPTDataset",
    "GPTDatasetConfig",
    "HuggingFaceTokenizer",
    "IMPLEMENTATION",
    "IndexCache",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "JsonlRows",
    "MappedTokens",
    "MegatronDataset",
    "MegatronFullValidationSampler",
    "MegatronPretrainingRandomSampler",
    "MegatronPretrainingSampler",
    "MockGPTDataset",
    "MockGPTLowLevelDataset",
    "NewFile",
    "NullTokenizer",
    "NumMicroBatches",
    "ObjectStorageConfig",
    "ParallelGroups",
    "ParquetRows",
    "Plan",
    "PlanRow",
    "PlannedDataset",
    "PretrainingDataLoader",
    "RemoteFile",
    "RemoteTokens",
    "RerunDataIterator",
    "SFTDataset",
    "SampleFinder",
    "Span",
    "Split",
    "TokenSource",
    "__version__",
    "build_blending_indices",
    "build_document_index",
    "build_exhaustive_blending_indices",
    "build_phase_indices",
    "build_pretraining_data_loader",
    "build_sample_idx",
    "build_shuffle_index",
    "build_stable_orders",
    "build_tokenizer",
    "causal_mask",
    "check_all_shards",
    "check_data_consistency",
    "check_position",
    "commit_pair",
    "convert_split_vector_to_split_matrix",
    "count_samples",
    "count_samples_of_epochs",
    "cyclic_iter",
    "describe",
    "encode_conversation",
    "encode_document",
    "encode_jsonl",
    "explain",
    "fetch_index",
    "file_exists",
    "file_stamp",
    "finalize_model_grads",
    "fingerprint",
    "fingerprint_of_past",
    "forward_backward_no_pipelining",
    "get_batch",
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_bin_path",
    "get_blend_from_list",
    "get_idx_path",
    "get_train_valid_test_num_samples",
    "hide_credentials",
    "input_of_document",
    "is_remote",
    "map_ahead",
    "map_file",
    "merge",
    "normalize",
    "on_every_rank",
    "open_tokens",
    "pack_conversations",
    "parse_and_normalize_split",
    "plan",
    "plan_epochs",
    "positions_from",
    "preprocess",
    "read_record",
    "releases_the_gil",
    "save_position",
    "shard_of_launcher",
    "shuffle",
    "split_conversations",
    "split_range",
    "toy_corpus",
    "trace_sample",
    "verify_cache",
    "warn_of_other_tokenizer",
]

log = logging.getLogger("megatron_min")


class DatasetFormatError(ValueError):
    """A file does not hold what its format promises.

    The message names the file, the field, what was wanted and what was found.
    """


# ==============================================================================
# PART I: THE PATH OF A TOKEN
# ==============================================================================
#
# ==============================================================================
# 1. The file pair
# ==============================================================================
# Question answered here: where on disk are the tokens of sequence i?
#
# A corpus is two files.  The .bin file holds the tokens of all sequences, one after the other.  The
# .idx file says where each sequence begins, how long it is, and which sequences form a document.
#
#   corpus.bin   a a a a b b b c c c c c c      the tokens of all sequences, here of one byte each
#                ^       ^     ^
#   corpus.idx   0       4     7                sequence_pointers: where each begins, in bytes
#                4       3     6                sequence_lengths: how many tokens each has
#                0       1     2           3    document_indices: document d is the sequences
#                                               document_indices[d] .. document_indices[d + 1] - 1
#
# The .idx file describes n sequences.  Its document_indices have m entries: one for each document,
# and one more.  All integers are little-endian.
#
#   OFFSET      SIZE   FIELD
#   0           9      magic b"MMIDIDX\0\0"
#   9           8      version, uint64, always 1
#   17          1      dtype code of the .bin file, uint8 (see DType)
#   18          8      n, uint64
#   26          8      m, uint64
#   34          4n     sequence_lengths, int32
#   34+4n       8n     sequence_pointers, int64
#   34+12n      8m     document_indices, int64
#   34+12n+8m   n      sequence_modes, int8, only in multimodal files
#
# A mode is a small number that says what kind of data a sequence holds, such as text or image.
# This module stores modes and gives them back.
#
# A file may be damaged, cut short or forged, so nothing of it is used unchecked:
#
#   what              when                              against
#   header and sizes  at every open, in O(1)            the table above, and the size of the .bin
#   first and last    at every open, in O(1)            documents run from 0 to n, and the last
#   entries                                             sequence ends where the .bin ends
#   all entries       at the open of an .idx below      lengths are >= 0, each pointer is the sum
#                     64 MiB, in verify(), and before   of the lengths before it, in bytes, and
#                     section 4 orders its sequences    documents never go back
#   one place         at every access                   the bounds of the sequence and of the .bin

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, n, m: the first 34 bytes
_SMALL_INDEX_BYTES = 64 << 20  # a larger .idx takes too long to check at every open on every rank
_CHUNK = 1 << 14  # entries that are checked at a time: temporary arrays stay in the CPU's cache


class DType(enum.Enum):
    """The dtype code in an .idx header, and the numpy dtype of the .bin file.  Upstream: DType.

    >>> DType.code_from_dtype(np.uint16), DType.dtype_from_code(4), DType.size(8)
    (8, <class 'numpy.int32'>, 2)
    """

    uint8 = 1
    int8 = 2
    int16 = 3
    int32 = 4
    int64 = 5
    float64 = 6
    float32 = 7
    uint16 = 8

    @classmethod
    def code_from_dtype(cls, value: type) -> int:
        """Return the code of a numpy dtype; ValueError if the format has no code for it."""
        name = np.dtype(value).name
        if name not in cls.__members__:
            raise ValueError(f"no dtype code for {name}: use one of {', '.join(cls.__members__)}")
        return cls[name].value

    @classmethod
    def dtype_from_code(cls, value: int) -> type:
        """Return the numpy type of a code; ValueError if the code is not in the table."""
        if value not in range(1, 9):
            raise ValueError(f"unknown dtype code {value}: wanted 1 to 8")
        return getattr(np, cls(value).name)

    @staticmethod
    def size(key: int | type) -> int:
        """Return the bytes of one token; key is a code or a dtype."""
        if isinstance(key, int):
            key = DType.dtype_from_code(key)
        return np.dtype(key).itemsize

    @staticmethod
    def optimal_dtype(cardinality: int | None) -> type:
        """Return upstream's choice for a vocabulary size: uint16 below 65500, else int32."""
        if cardinality is not None and cardinality < 65500:
            return np.uint16
        return np.int32


def get_idx_path(path_prefix: str | os.PathLike) -> str:
    """Return the path of the index file: "corpus" -> "corpus.idx".  Upstream: get_idx_path."""
    return f"{os.fspath(path_prefix)}.idx"


def get_bin_path(path_prefix: str | os.PathLike) -> str:
    """Return the path of the token file: "corpus" -> "corpus.bin".  Upstream: get_bin_path."""
    return f"{os.fspath(path_prefix)}.bin"


class IndexedDataset(torch.utils.data.Dataset):
    """Read a .bin/.idx pair.  Upstream: IndexedDataset.

    path_prefix            path of the pair without .bin and .idx; or its place on object storage,
                           such as s3://bucket/corpus (section 13)
    multimodal             return (tokens, mode); the file must hold modes
    mmap                   True: arrays are views of the mapped file; False: each access reads the
                           file into a new array
    object_storage_config  ObjectStorageConfig; None: its defaults
    check                  True: check the whole .idx when it is opened, as verify() does;
                           False: only what takes O(1); None: the whole if it is below 64 MiB
    fast_cache_load        upstream's name: True is check=False, where check is None

    ds[i] is sequence i, a 1-D array of ds.dtype, and ds[a:b] a list of such arrays.  Opening costs
    O(1), or O(n) with the whole check.  A file that is not what its format says is a
    DatasetFormatError (a ValueError); a place outside of the dataset is an IndexError.

    >>> ds = IndexedDataset(toy_corpus())
    >>> len(ds), ds.sequence_lengths.tolist(), ds.sequence_pointers.tolist()
    (3, [4, 3, 6], [0, 4, 7])
    >>> ds.document_indices.tolist(), bytes(ds.get(2, offset=1, length=2))
    ([0, 1, 2, 3], b'cc')
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike,
        multimodal: bool = False,
        mmap: bool = True,
        object_storage_config: typing.Any = None,
        check: bool | None = None,
        fast_cache_load: bool = False,
    ) -> None:
        if fast_cache_load and check is None:
            check = False
        self.path_prefix = os.fspath(path_prefix)
        self.multimodal = multimodal
        self.mmap = mmap
        self.object_storage_config = object_storage_config
        self.check = check
        self._verified = False
        self._open_index()
        self._open_tokens()
        if check or (check is None and len(self._idx_content) < _SMALL_INDEX_BYTES):
            self.verify()

    def _open_index(self):
        """Map the .idx file, check its header and size, and find its arrays."""
        path = get_idx_path(self.path_prefix)
        if not is_remote(path) and not os.path.exists(path):
            raise FileNotFoundError(_describe_missing_pair(self.path_prefix))
        self._idx_stamp = file_stamp(path)
        content = map_file(fetch_index(path, self._idx_stamp, self.object_storage_config))
        self._idx_content = content
        if len(content) < _HEADER.size:
            raise _format_error(path, "file size", f"at least {_HEADER.size} bytes", len(content))
        magic, version, code, n, m = _HEADER.unpack(content[: _HEADER.size].tobytes())
        if magic != _MAGIC or version != _VERSION:
            raise _format_error(path, "magic, version", (_MAGIC, _VERSION), (magic, version))
        if not 1 <= code <= 8:
            raise _format_error(path, "dtype code", "1 to 8", code)
        self._check_idx_size(path, n, m)
        self.dtype = DType.dtype_from_code(code)
        self.sequence_lengths = np.frombuffer(content, np.int32, n, 34)
        self.sequence_pointers = np.frombuffer(content, np.int64, n, 34 + 4 * n)
        self.document_indices = np.frombuffer(content, np.int64, m, 34 + 12 * n)
        self.sequence_modes = None
        if self.multimodal:
            self.sequence_modes = np.frombuffer(content, np.int8, n, 34 + 12 * n + 8 * m)
        ends = [int(self.document_indices[0]), int(self.document_indices[-1])] if m else []
        if ends != [0, n]:
            raise _format_error(path, "document_indices", f"from 0 to {n}", ends)

    def _check_idx_size(self, path, n, m):
        """The .idx has exactly the bytes that its header implies."""
        without_modes = 34 + 12 * n + 8 * m
        with_modes = without_modes + n
        found = len(self._idx_content)
        if self.multimodal and found != with_modes:
            raise _format_error(path, "file size", f"{with_modes} bytes with modes", found)
        if found not in (without_modes, with_modes):
            wanted = f"{with_modes} bytes with modes or {without_modes} without"
            raise _format_error(path, "file size", wanted, found)

    def _open_tokens(self):
        """Open the .bin file, whose size the last sequence of the .idx must reach exactly."""
        path = get_bin_path(self.path_prefix)
        idx_path = get_idx_path(self.path_prefix)
        self._token_bytes = DType.size(self.dtype)
        end = 0
        if len(self):
            size = int(self.sequence_lengths[-1]) * self._token_bytes
            end = int(self.sequence_pointers[-1]) + size
        found = file_stamp(path)["size"]
        if end % self._token_bytes:
            field = f"end of the last sequence ({self.dtype.__name__} tokens)"
            raise _format_error(idx_path, field, f"a multiple of {self._token_bytes}", end)
        if found != end:
            raise _format_error(
                path,
                f"file size ({self.dtype.__name__} tokens)",
                f"{end} bytes, as {idx_path} says",
                f"{found}: the file is truncated, or belongs to another .idx",
            )
        self.num_tokens = end // self._token_bytes
        self._tokens = open_tokens(path, self.dtype, self.mmap, self.object_storage_config)
        # Another process may replace the pair between the opening of the .idx and that of the .bin.
        # commit_pair() removes the old .idx before it touches the .bin: so if the .idx that was
        # opened is still there now, the .bin that was opened belongs to it.
        if file_stamp(idx_path) != self._idx_stamp:
            raise _format_error(idx_path, "file", "one that stays while it is opened", "another")

    def verify(self) -> None:
        """Check every entry of the .idx, once, in O(n).

        Lengths are >= 0, each pointer is the bytes of the sequences before it, and documents never
        go back.
        """
        if self._verified:
            return
        self._verify_sequences()
        self._verify_documents()
        self._verified = True

    def _verify_sequences(self):
        """Each sequence begins where the one before it ends."""
        path = get_idx_path(self.path_prefix)
        end = 0
        for low in range(0, len(self), _CHUNK):
            lengths = self.sequence_lengths[low : low + _CHUNK]
            pointers = self.sequence_pointers[low : low + _CHUNK]
            ends = pointers + lengths * np.int64(self._token_bytes)
            wanted = np.concatenate([[end], ends[:-1]])
            wrong = np.flatnonzero((lengths < 0) | (pointers != wanted))
            if len(wrong):
                at = wrong[0]
                if lengths[at] < 0:
                    raise _format_error(path, f"sequence_lengths[{low + at}]", ">= 0", lengths[at])
                field = f"sequence_pointers[{low + at}]"
                raise _format_error(path, field, wanted[at], pointers[at])
            end = ends[-1]

    def _verify_documents(self):
        """Each document begins where, or after, the one before it begins."""
        path = get_idx_path(self.path_prefix)
        for low in range(0, len(self.document_indices) - 1, _CHUNK):
            found = self.document_indices[low : low + _CHUNK + 1]
            wrong = np.flatnonzero(found[1:] < found[:-1])
            if len(wrong):
                at = wrong[0]
                field = f"document_indices[{low + at + 1}]"
                raise _format_error(path, field, f">= {found[at]}", found[at + 1])

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int | slice) -> typing.Any:
        if not isinstance(idx, slice):
            return self.get(idx)
        if idx.step not in (None, 1):
            raise ValueError(f"slices of a dataset are contiguous, got step {idx.step}")
        spans = [self._span(i, 0, None) for i in range(len(self))[idx]]
        sequences = self._tokens.read_many(spans)
        if self.multimodal:
            return sequences, self.sequence_modes[idx]
        return sequences

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> typing.Any:
        """Return length tokens of sequence idx from offset on (default: to its end).

        Returns   a 1-D array of the dtype of the file; with modes (tokens, mode)
        Raises    IndexError for a place outside of the sequence
        Cost      O(1), or one read where the file is not mapped
        """
        i = _position(idx, len(self), self.path_prefix)
        first, count = self._span(i, offset, length)
        tokens = self._tokens.read(first, count)
        if self.multimodal:
            return tokens, self.sequence_modes[i]
        return tokens

    def get_many(self, pieces: typing.Iterable[tuple[int, int, int]]) -> list[np.ndarray]:
        """Return the tokens of several (sequence, offset, length), without modes.

        The equal of get() for each piece; those of object storage are fetched at the same time.
        """
        spans = []
        for idx, offset, length in pieces:
            i = _position(idx, len(self), self.path_prefix)
            spans.append(self._span(i, offset, length))
        return self._tokens.read_many(spans)

    @property
    def is_mapped(self) -> bool:
        """Are the tokens read from a mapping, where a read costs next to nothing?"""
        return type(self._tokens) is MappedTokens

    def _span(self, i, offset, length):
        """Where a part of sequence i lies: (tokens of the .bin before the part, tokens of it)."""
        pointer = int(self.sequence_pointers[i])
        size = int(self.sequence_lengths[i])
        start, rest = divmod(pointer, self._token_bytes)
        if rest or start < 0 or size < 0 or start + size > self.num_tokens:
            # only an .idx that was not checked as a whole can be wrong in this way
            found = f"byte {pointer}, {size} tokens"
            path = get_idx_path(self.path_prefix)
            raise _format_error(path, f"sequence {i}", "a place in .bin", found)
        offset = operator.index(offset)
        length = size - offset if length is None else operator.index(length)
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"{hide_credentials(self.path_prefix)}[{i}] has {size} tokens, "
                f"wanted {offset} to {offset + length}"
            )
        return start + offset, length

    def blocks_of_tokens(self) -> typing.Iterator[np.ndarray]:
        """Yield all tokens of the .bin file, in order, in arrays of at most 16 MiB."""
        size = (16 << 20) // self._token_bytes
        for start in range(0, self.num_tokens, size):
            yield self._tokens.read(start, min(size, self.num_tokens - start))

    def identity(self) -> dict:
        """Return what tells this .idx from one that was written later.

        That is its size, the time of its last change, and a digest of its first and last 64 KiB.
        """
        first = self._idx_content[:65536].tobytes()
        last = self._idx_content[-65536:].tobytes()
        return {
            "idx_size": self._idx_stamp["size"],
            "idx_mtime_ns": self._idx_stamp["changed"],
            "idx_ends": _md5(first + last),
        }

    @property
    def index(self) -> "IndexedDataset":
        """The object that has the arrays of the .idx, as in upstream: the dataset itself."""
        return self

    def get_document_indices(self) -> np.ndarray:
        """Return document_indices, under upstream's name."""
        return self.document_indices

    def __reduce__(self):
        """Pickle the path alone: the process that unpickles it opens the files again."""
        arguments = self.path_prefix, self.multimodal, self.mmap
        return type(self), (*arguments, self.object_storage_config, self.check)

    @staticmethod
    def exists(path_prefix: str | os.PathLike) -> bool:
        """Return True if both files of the pair exist.  Upstream: the same name."""
        return file_exists(get_idx_path(path_prefix)) and file_exists(get_bin_path(path_prefix))


def _format_error(path, field, wanted, got):
    """The error that names the four things a reader of the message needs."""
    return DatasetFormatError(hide_credentials(f"{path}: {field}: wanted {wanted}, got {got}"))


def _describe_missing_pair(prefix):
    """The sentence for a prefix without an .idx: it names pairs of the folder with such a name."""
    folder, name = os.path.split(prefix)
    if folder and not os.path.isdir(folder):
        return f"{get_idx_path(prefix)}: there is no folder {folder}"
    pairs = sorted(path.stem for path in pathlib.Path(folder).glob("*.idx"))
    stem = name.removesuffix(".bin").removesuffix(".idx")
    alike = [pair for pair in pairs if pair.startswith(stem)]
    if not alike:
        alike = difflib.get_close_matches(stem, pairs)
    if alike:
        found = " or ".join(os.path.join(folder, pair) for pair in alike[:3])
        return f"{get_idx_path(prefix)}: no such file; did you mean {found}?"
    return f"{get_idx_path(prefix)}: no such file: wanted the path of a pair without .bin and .idx"


def _position(idx, n, name):
    """A Python index, where -1 is the last -> 0 .. n - 1; IndexError outside of -n .. n - 1."""
    i = operator.index(idx)
    if not -n <= i < n:
        raise IndexError(f"index {i} of {hide_credentials(name)}, which has {n} entries")
    return i % n


class IndexedDatasetBuilder(contextlib.AbstractContextManager):
    """Write a .bin/.idx pair.  Upstream: IndexedDatasetBuilder; the files are equal byte for byte.

    bin_path     path of the token file, which has a temporary name until finalize()
    dtype        dtype of the stored tokens; an id that does not fit is refused, never wrapped
    multimodal   store a mode (int8) for each sequence too

    Use a builder in a with block: the block ends in finalize(), with the .idx beside the .bin, or,
    if an exception ends it, without any file.  Without a with block, call finalize() yourself.
    Wrong input is a ValueError, or a TypeError where a number is no integer, before anything of it
    is written.  After a write that failed, as on a full disk, nothing more can be added.  Memory: 4
    bytes for each sequence and 8 for each document, and a copy of the tokens of one call;
    finalize() takes 16 bytes more for each sequence.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     prefix = os.path.join(folder, "pair")
    ...     with IndexedDatasetBuilder(get_bin_path(prefix), np.uint16) as builder:
    ...         builder.add_document([97, 97, 98], [2, 1])       # two sequences, one document
    ...     IndexedDataset(prefix)[:], os.path.getsize(get_bin_path(prefix))
    ([array([97, 97], dtype=uint16), array([98], dtype=uint16)], 6)
    """

    def __init__(
        self, bin_path: str | os.PathLike, dtype: type = np.int32, multimodal: bool = False
    ) -> None:
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))
        self._token_dtype = np.dtype(self.dtype)
        self.multimodal = multimodal
        self.sequence_lengths = array.array("i")  # int32
        self.sequence_modes = array.array("b")  # int8
        self.document_indices = array.array("q", [0])  # int64
        self._bin = NewFile(bin_path)  # section 11: it has a temporary name until commit_pair()

    def add_document(
        self, tensor: typing.Any, lengths: typing.Iterable[int], modes: typing.Any = None
    ) -> None:
        """Append a document: its tokens, and the lengths of its sequences, which must add up.

        Sequences that add_item() added since the last end belong to the document too.
        """
        self._append(_encode_tokens(tensor, self._token_dtype), lengths, modes)
        self.document_indices.append(len(self.sequence_lengths))

    def add_documents(
        self, documents: typing.Any, modes: typing.Any = None, eod_token: int | None = None
    ) -> None:
        """Append many documents, each of which is one sequence.

        documents   a list of arrays, or an array of the package awkward
        modes       one int8 for each document; None: all 0
        eod_token   put this id after each document that has tokens
        """
        eod = _as_tokens([] if eod_token is None else [eod_token], self._token_dtype)
        pieces = [_as_tokens([], self._token_dtype)]  # so that there is something to concatenate
        lengths = []
        for tokens in _as_arrays(documents, self._token_dtype):
            pieces.append(tokens)
            lengths.append(len(tokens))
            if len(tokens) > 0:
                pieces.append(eod)
                lengths[-1] += len(eod)
        first = len(self.sequence_lengths)
        self._append(np.concatenate(pieces), lengths, modes)
        self.document_indices.extend(range(first + 1, first + len(lengths) + 1))

    def add_item(self, tensor: typing.Any, mode: int = 0) -> None:
        """Append one sequence of token ids (tensor, array or list; it is flattened).

        The sequence belongs to the document that the next end_document() ends.
        """
        tokens = _encode_tokens(tensor, self._token_dtype)
        self._append(tokens, [len(tokens) // self._token_dtype.itemsize], [mode])

    def end_document(self) -> None:
        """End the document of the sequences that were added since the last end."""
        self._check_open()
        self.document_indices.append(len(self.sequence_lengths))

    def finalize(self, idx_path: str | os.PathLike) -> None:
        """Write the .idx file and give both files their names.

        ValueError if sequences were added after the last document ended.
        """
        self._check_open()
        if len(self.sequence_lengths) != self.document_indices[-1]:
            raise ValueError(
                f"{self._bin.path}: no document ends after sequence "
                f"{self.document_indices[-1]}: call end_document() before finalize()"
            )
        lengths = np.frombuffer(self.sequence_lengths, np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * self._token_dtype.itemsize
        _check_size(self._bin, int(ends[-1]) if len(ends) else 0)
        code = DType.code_from_dtype(self.dtype)
        index = NewFile(idx_path)
        try:
            n = len(self.sequence_lengths)
            m = len(self.document_indices)
            index.file.write(_HEADER.pack(_MAGIC, _VERSION, code, n, m))
            index.file.write(lengths)
            index.file.write(ends - lengths * np.int64(self._token_dtype.itemsize))
            index.file.write(self.document_indices)
            index.file.write(self.sequence_modes)
            commit_pair(self._bin, index)
        finally:
            index.discard()  # does nothing once the file has its name

    def add_index(self, path_prefix: str | os.PathLike) -> None:
        """Append a whole pair of the same dtype: its bytes are copied, its documents renumbered.

        ValueError if the pair has another dtype, or modes that would be lost, or is the one that is
        being written.
        """
        self._check_open()
        _append_pair(self, path_prefix)

    def sync(self) -> None:
        """Have the disk hold all tokens so far; OSError if it is full."""
        self._bin.sync()

    def _append(self, tokens, lengths, modes=None, ends=()):
        """Append sequences: bytes, or an array of dtype.  All is checked before it is written.

        ends   one number for each document that ends here: how many sequences of this call come
               before its end.  With lengths [2, 1, 3] and ends [0, 2, 3], a document of no sequence
               ends first, then one of two sequences, then one of one.
        """
        self._check_open()
        lengths = _as_compact_array(lengths, "i", "lengths of sequences")
        ends = _as_compact_array(ends, "q", "ends of documents")
        num_tokens = memoryview(tokens).nbytes // self._token_dtype.itemsize
        if sum(lengths) != num_tokens or (lengths and min(lengths) < 0):
            raise ValueError(
                f"{self._bin.path}: wanted lengths >= 0 that sum to the {num_tokens} tokens, "
                f"got lengths {lengths.tolist()!s:.60} that sum to {sum(lengths)}"
            )
        if modes is None:
            modes = bytes(len(lengths))
        modes = _as_compact_array(modes, "b", "modes of sequences")
        if len(modes) != len(lengths):
            raise ValueError(
                f"{self._bin.path}: wanted a mode for each of the {len(lengths)} sequences, "
                f"got {len(modes)} modes"
            )
        self._write(tokens)
        first = len(self.sequence_lengths)
        self.sequence_lengths.extend(lengths)
        self.document_indices.extend([first + end for end in ends])
        if self.multimodal:
            self.sequence_modes.extend(modes)

    def _write(self, tokens):
        """Write tokens to the .bin file.  What failed once may have written a part: it is over."""
        try:
            self._bin.file.write(tokens)
        except BaseException:
            self._bin.discard()
            raise

    def _check_open(self):
        """ValueError once the pair is finished, or a write has failed."""
        if self._bin.file.closed:
            raise ValueError(f"{self._bin.path} is finalized, or has failed: nothing can be added")

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None and not self._bin.file.closed:
                self.finalize(get_idx_path(self._bin.path.removesuffix(".bin")))
        finally:
            self._bin.discard()  # does nothing once the file has its name


def toy_corpus(folder: str | os.PathLike | None = None) -> str:
    """Write the documents of every example, aaaa bbb cccccc, in ASCII, and return their prefix.

    folder   where the pair is written; None: a new temporary folder, which is removed when the
             program ends

    >>> [bytes(document).decode() for document in IndexedDataset(toy_corpus())]
    ['aaaa', 'bbb', 'cccccc']
    """
    if folder is None:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    prefix = os.path.join(folder, "toy")
    with IndexedDatasetBuilder(get_bin_path(prefix), np.uint8) as builder:
        for text in (b"aaaa", b"bbb", b"cccccc"):
            builder.add_document(list(text), [len(text)])
    return prefix


# ==============================================================================
# 2. Text to tokens
# ==============================================================================
# Question answered here: how do lines of JSON become a pair?
#
#   a line of corpus.jsonl        its tokens         what the pair gets      document_indices
#                                 ($ is eod)         tokens       length     so far: 0
#
#   {"text": "aaaa"}       ->     a a a a $      ->  a a a a $    5          0 1
#   {"text": ""}           ->     (no tokens)    ->                          0 1 1
#   {"text": "bbb"}        ->     b b b $        ->  b b b $      4          0 1 1 2
#
# A line is a document, and a document becomes one sequence; or, if the text is a list of sentences,
# one sequence for each sentence that has tokens.  A blank line is no document.  The end-of-document
# token, eod, tells a model where one text stops and an unrelated one begins.  A document without
# tokens becomes no sequence and gets no eod: the number of sequences is repeated in
# document_indices, so that document d is still line d.  Upstream does the same.
#
# A tokenizer is any object with these attributes; there is no class to inherit from:
#
#   vocab_size           how many ids there are; fewer than 65500 are stored as uint16, else int32
#   eod                  the id that ends a document
#   pad                  the id that fills up a sample which is too short; it may be missing, and a
#                        tokenizer may have eos and special_tokens_dict: see _pad_token_id()
#   tokenize(text)       str -> list of ids
#   detokenize(ids)      ids -> str
#   unique_identifiers   a dict that can be written as JSON and says which tokenizer this is, so
#                        that indices made with one tokenizer are not used again with another


class ByteTokenizer:
    """The UTF-8 bytes of a text are its tokens, 0 to 255; eod is 256.

    Needs no files and loses nothing, but makes about four times as many tokens of English text as a
    trained tokenizer.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.tokenize("aaaa")
    [97, 97, 97, 97]
    >>> tokenizer.detokenize([98, 256])
    'b'
    """

    vocab_size = 257
    eod = 256
    unique_identifiers = {"class": "ByteTokenizer"}

    def tokenize(self, text: str) -> list[int]:
        """Return the bytes of a text in UTF-8."""
        return list(text.encode("utf-8"))

    def tokenize_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the bytes of each text as an array, which takes an eighth of a list's memory."""
        return [np.frombuffer(text.encode("utf-8"), np.uint8) for text in texts]

    def detokenize(self, ids: typing.Iterable[int]) -> str:
        """Return the text of some ids, without eods; broken UTF-8 becomes U+FFFD."""
        text_bytes = bytes(token for token in ids if token < 256)
        return text_bytes.decode("utf-8", errors="replace")


def encode_document(
    text: str | list[str], tokenizer: typing.Any, append_eod: bool = False
) -> list[list[int]]:
    """Return the sequences of one document, each a list of token ids; none is empty.

    text         the text, which becomes one sequence, or a list of sentences, one for each
    append_eod   put tokenizer.eod after the last token, if there is any token

    >>> encode_document("bbb", ByteTokenizer(), append_eod=True)
    [[98, 98, 98, 256]]
    >>> encode_document(["aa", "", "b"], ByteTokenizer(), append_eod=True)
    [[97, 97], [98, 256]]
    >>> encode_document("", ByteTokenizer(), append_eod=True)
    []
    """
    sequences = []
    for sentence in _sentences(text):
        tokens = list(tokenizer.tokenize(sentence))
        if len(tokens) > 0:
            sequences.append(tokens)
    if append_eod and len(sequences) > 0:
        sequences[-1].append(tokenizer.eod)
    return sequences


def _sentences(text):
    """The sentences of a text; a text that is no list of them is one."""
    return [text] if isinstance(text, str) else text


def encode_jsonl(
    input_path: str | os.PathLike,
    output_prefix: str | os.PathLike,
    tokenizer: typing.Any = None,
    *,
    json_key: str = "text",
    append_eod: bool = False,
) -> None:
    """Write the texts of a file of JSON lines as the pair output_prefix.bin and output_prefix.idx.

    input_path    a file with one JSON object a line, in UTF-8
    tokenizer     an object as described above; default ByteTokenizer()
    json_key      the text of a document is found in its object under this key
    append_eod    put tokenizer.eod after each document that has tokens
    Raises        an error at a line that holds no such object; then no pair appears

    This is the definition of preprocess() in section 18, which writes the same bytes, uses all
    cores of a machine, and names the file and the line of an error.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "corpus.jsonl")
    ...     _ = path.write_text('{"text": "aaaa"}\\n{"text": ""}\\n{"text": "bbb"}\\n')
    ...     encode_jsonl(path, os.path.join(folder, "corpus"), append_eod=True)
    ...     pair = IndexedDataset(os.path.join(folder, "corpus"))
    >>> pair[:]
    [array([ 97,  97,  97,  97, 256], dtype=uint16), array([ 98,  98,  98, 256], dtype=uint16)]
    >>> pair.document_indices.tolist()
    [0, 1, 1, 2]
    """
    if tokenizer is None:
        tokenizer = ByteTokenizer()
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    with IndexedDatasetBuilder(get_bin_path(output_prefix), dtype) as builder:
        # Lines are read as bytes: in text mode Python would also end a line at a lone "\r".
        with open(input_path, "rb") as file:
            for line in file:
                if line.isspace():
                    continue
                text = json.loads(line)[json_key]
                sequences = encode_document(text, tokenizer, append_eod)
                for tokens in sequences:
                    builder.add_item(tokens)
                builder.end_document()  # a document may have no sequences


# ==============================================================================
# 3. Split, blend, config
# ==============================================================================
# Question answered here: which documents of which corpora, and cut how?
#
#   split "98,1,1" of a corpus of 1000 sequences      |<------- train 0..979 ------->|valid|test|
#   blend (["p1", "p2"], [30, 70])                    of 10 samples 3 come from p1 and 7 from p2
#
# A split cuts one corpus into parts that have no sequence in common.  A blend mixes corpora.  A
# config holds both, with everything else that decides what a sample looks like.
#
# What is split here, and ordered in section 4, are the sequences of the .idx file.  Upstream calls
# them documents there, as nearly always a document is one sequence, and so do the names below.  The
# array document_indices of the .idx file is not used for training.


class Split(enum.Enum):
    """The three parts of a corpus.  Upstream: Split."""

    train = 0
    valid = 1
    test = 2


def normalize(weights: typing.Sequence[float]) -> list[float]:
    """Divide weights by their sum, in float64.  Upstream: normalize.

    >>> normalize([30, 70])
    [0.3, 0.7]
    """
    weights = np.array(weights, np.float64)
    return (weights / np.sum(weights)).tolist()


def parse_and_normalize_split(split: str) -> list[float]:
    """Read the shares of train, valid and test from a string, and normalize them.

    The shares stand between commas, semicolons, slashes or spaces, with or without brackets around
    all of them.  Wanted are one to three numbers, none negative, not all 0; missing shares are 0.
    Anything else is a ValueError (upstream drops signs, exponents and empty fields).  Upstream:
    parse_and_normalize_split.

    >>> parse_and_normalize_split("3,1")
    [0.75, 0.25, 0.0]
    """
    fields = re.split(r"\s*[,;/]\s*|\s+", str(split).strip("[]() "))
    shares = [_number(field) for field in fields]
    is_numbers = None not in shares and len(shares) <= len(Split)
    if not is_numbers or min(shares) < 0 or not 0 < sum(shares) < math.inf:
        raise ValueError(
            f'split {split!r}: wanted up to 3 numbers >= 0, not all 0, such as "98,1,1"'
        )
    missing = len(Split) - len(shares)
    return normalize(shares + [0.0] * missing)


def _number(text):
    """The decimal number that a text is, or None: float() would also take 2023_01, inf and nan."""
    if re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text) is None:
        return None
    number = float(text)
    return number if math.isfinite(number) else None


def convert_split_vector_to_split_matrix(
    vector_a: typing.Sequence[float], vector_b: typing.Sequence[float] | None = None
) -> list[tuple[float, float] | None]:
    """Turn shares into the (begin, end) of each split, as fractions of a corpus; None where empty.

    With two vectors, both cut the same corpus, and each entry is what the two cuts of that split
    have in common: from the later begin to the earlier end.  Upstream has this; the builder of
    section 7 does not use it.  ValueError if the vectors differ in length.

    >>> convert_split_vector_to_split_matrix([0.75, 0.25, 0.0])
    [(0, 0.75), (0.75, 1.0), None]
    """
    edges_a = list(itertools.accumulate(vector_a, initial=0))
    edges_b = edges_a
    if vector_b is not None:
        edges_b = list(itertools.accumulate(vector_b, initial=0))
    if len(edges_a) != len(edges_b):
        raise ValueError(f"wanted two split vectors of one length, got {vector_a} and {vector_b}")
    matrix = []
    for k in range(len(edges_a) - 1):
        begin = max(edges_a[k], edges_b[k])
        end = min(edges_a[k + 1], edges_b[k + 1])
        matrix.append((begin, end) if begin < end else None)
    return matrix


def split_range(bounds: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """Turn fractions of a corpus into (first sequence, end); halves are rounded to even numbers.

    >>> split_range((0, 0.75), 3), split_range((0.75, 1.0), 3)
    ((0, 2), (2, 3))
    """
    begin, end = bounds
    return round(begin * float(num_sequences)), round(end * float(num_sequences))


def get_blend_from_list(
    blend: typing.Sequence[str] | None,
) -> tuple[list[str], list[float] | None] | None:
    """Read weights and prefixes in turn, or prefixes alone; return (prefixes, weights or None).

    None stays None.  A list that is neither is a ValueError (upstream guesses).  A prefix that
    looks like a number would be taken for a weight: write ./2023 for a folder 2023.  Upstream:
    get_blend_from_list.

    >>> get_blend_from_list(["30", "p1", "70", "p2"])
    (['p1', 'p2'], [30.0, 70.0])
    >>> get_blend_from_list(["2023_01", "wiki"])
    (['2023_01', 'wiki'], None)
    """
    if blend is None:
        return None
    if isinstance(blend, str) or not isinstance(blend, collections.abc.Iterable):
        raise ValueError(f"wanted a list of prefixes, or of weights and prefixes, got {blend!r}")
    entries = [str(entry).strip() for entry in blend]
    is_number = [_number(entry) is not None for entry in entries]
    if entries and not any(is_number):
        return entries, None
    pairs = len(entries) // 2
    if not entries or is_number != [True, False] * pairs:
        raise ValueError(
            f"blend {entries}: wanted prefixes, or weights and prefixes in turn "
            "(write a prefix that is a number with its folder: ./2023)"
        )
    return entries[1::2], [float(weight) for weight in entries[0::2]]


def _read_weights(weights, names):
    """The weights as a list of Python's numbers; ValueError that says which weight is wrong.

    Wanted is a finite number >= 0 for each name.  It may be a text, as in a file of JSON.
    """
    if isinstance(weights, str) or not hasattr(weights, "__len__"):
        raise ValueError(f"wanted a list of weights, got {weights!r}")
    if len(weights) != len(names):
        raise ValueError(f"{len(weights)} weights for {len(names)} datasets")
    numbers_read = []
    for weight, name in zip(weights, names, strict=True):
        number = weight
        if isinstance(weight, str):
            number = _number(weight.strip())
        elif isinstance(weight, np.generic):
            number = weight.item()
        # float(number) would fail for a very large integer: compare with the largest float instead
        if not isinstance(number, numbers.Real) or not 0 <= number <= sys.float_info.max:
            raise ValueError(f"weight of {name}: wanted a finite number >= 0, got {weight!r}")
        numbers_read.append(number)
    total = sum(float(number) for number in numbers_read)
    if not 0 < total < math.inf:
        raise ValueError(f"weights {numbers_read}: wanted a finite sum > 0")
    return numbers_read


def _drop_zero_weights(datasets, weights, names):
    """The datasets whose weights are not 0, and these weights; a note names the dropped ones."""
    kept = []
    dropped = []
    for dataset, weight, name in zip(datasets, weights, names, strict=True):
        if weight:
            kept.append((dataset, weight))
        else:
            dropped.append(str(name))
    if dropped:
        log.warning("dropped from the blend, weight 0: %s", ", ".join(dropped))
    return [dataset for dataset, _ in kept], [weight for _, weight in kept]


def _as_phases(phases, names):
    """Phases as [(samples, normalized weights), ...]; ValueError that says which is no phase."""
    if not isinstance(phases, (list, tuple)) or len(phases) == 0:
        raise ValueError(f"phases: wanted [(samples, weights), ...], got {phases!r}")
    checked = []
    for number, phase in enumerate(phases):
        if not isinstance(phase, (list, tuple)) or len(phase) != 2:
            raise ValueError(f"phase {number}: wanted (samples, weights), got {phase!r}")
        samples, weights = phase
        if not isinstance(samples, numbers.Integral) or samples < 1:
            raise ValueError(f"phase {number}: wanted 1 sample or more, got {samples!r}")
        try:
            weights = _read_weights(weights, names)
        except ValueError as error:
            raise ValueError(f"phase {number}: {error}") from None
        checked.append((int(samples), _normalize_used(weights)))
    return checked


def _normalize_used(weights):
    """normalize() of the weights that are not 0: a 0 must not change the rounding of the sum."""
    weights = np.array(weights, np.float64)
    is_used = weights > 0
    weights[is_used] = normalize(weights[is_used])
    return weights.tolist()


@dataclasses.dataclass
class BlendedMegatronDatasetConfig:
    """What to build.  Field names and defaults are upstream's; ValueError for bad combinations.

    random_seed                 seed of every shuffle of documents and samples
    sequence_length             S, in tokens
    blend                       ([prefix, ...], [weight, ...] or None); each corpus is cut by split
    blend_per_split             a list of three: for each split a blend of whole corpora, or None
    multiple_validation_sets    with blend_per_split: valid becomes a list of datasets, one for each
                                of its corpora, where it has several
    full_validation             with multiple_validation_sets: each validation dataset is one epoch,
                                so the builder must be given None as the size of valid; alone it
                                changes nothing here
    split                       shares of train, valid, test, such as "98,1,1"
    num_dataset_builder_threads how many corpora are built side by side
    path_to_cache               folder of the index files of section 12; None: those of a corpus lie
                                in the folder <prefix>/cache, and those of a blend are not kept
    mmap_bin_files              False: read the tokens with os.pread instead of mapping the file
    tokenizer                   an object as in section 2: its eod and its pad are used
    mid_level_dataset_surplus   the share of extra samples that each corpus of a blend with weights
                                is built for: 0.005 is half a percent
    allow_ambiguous_pad_tokens  pad with the tokenizer's pad id even where eod or another special
                                token has the same id; if False, padding is -1 in this case
    fast_cache_load             trust a cache that exists, without any check
    defer_npy_index_mmap        open the index files at the first access
    blend_phases                not of upstream: [(samples, weights), ...], mixes of the training
                                blend that follow each other, instead of its weights (section 6);
                                use stable_order with it, so that phases that are added later leave
                                the order of the corpora as it is.  A corpus that is new in a later
                                phase goes to the end of blend, with weight 0 in the phases before

    Without blend and blend_per_split the data are mock data, see MockGPTDataset.
    """

    random_seed: int
    sequence_length: int
    blend: tuple | None = None
    blend_per_split: list | None = None
    multiple_validation_sets: bool | None = None
    full_validation: bool | None = None
    split: str | None = None
    split_matrix: list | None = dataclasses.field(init=False, default=None)
    num_dataset_builder_threads: int = 1
    path_to_cache: str | None = None
    mmap_bin_files: bool = True
    mock: bool = dataclasses.field(init=False, default=False)
    tokenizer: object | None = None
    mid_level_dataset_surplus: float = 0.005
    allow_ambiguous_pad_tokens: bool | None = False
    fast_cache_load: bool = False
    defer_npy_index_mmap: bool = False
    blend_phases: list | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self._check_whole_number("random_seed", 0)
        self._check_whole_number("sequence_length", 1)
        self._check_whole_number("num_dataset_builder_threads", 1)
        surplus = self.mid_level_dataset_surplus
        if not isinstance(surplus, numbers.Real) or not 0 <= surplus < math.inf:
            raise ValueError(f"mid_level_dataset_surplus: wanted a number >= 0, got {surplus!r}")
        self.blend_per_split = self._read_blend_per_split()
        if self.blend_per_split is None:
            self._set_split()
            self.blend = self._read_blend(self.blend)
        if self.blend_phases is not None:
            self._check_phases()

    def _check_whole_number(self, name, lowest):
        """The field is a whole number from lowest to 2**32 - 1; numpy's become int, for JSON."""
        value = getattr(self, name)
        if not hasattr(value, "__index__") or not lowest <= value < 2**32:
            raise ValueError(
                f"{name} must be a whole number from {lowest} to 2**32 - 1, got {value!r}"
            )
        setattr(self, name, int(value))

    def _read_blend_per_split(self):
        """The blend of each split, checked; None if no split has one of its own."""
        if not isinstance(self.blend_per_split, (list, tuple, types.NoneType)):
            raise ValueError(f"blend_per_split wants a list, got {self.blend_per_split!r}")
        if not self.blend_per_split or not any(self.blend_per_split):
            return None
        if self.blend is not None or self.split is not None:  # there is nothing to cut
            raise ValueError(
                "blend_per_split wants blend and split to be None, "
                f"got {self.blend} and {self.split}"
            )
        if len(self.blend_per_split) != len(Split):
            raise ValueError(
                f"blend_per_split wants {len(Split)} entries, got {len(self.blend_per_split)}"
            )
        return [self._read_blend(blend) for blend in self.blend_per_split]

    def _set_split(self):
        """Derive mock, split and split_matrix from the blend and the split."""
        self.mock = self.blend is None
        if self.mock:
            self.split = "1,1,1"
        if self.split is None:
            raise ValueError('a blend needs a split, such as "98,1,1"')
        if self.multiple_validation_sets:
            raise ValueError("multiple_validation_sets needs blend_per_split")
        shares = parse_and_normalize_split(self.split)
        self.split_matrix = convert_split_vector_to_split_matrix(shares)

    def _read_blend(self, blend):
        """A blend, checked: ([prefix, ...], [weight, ...] or None), or None."""
        if blend is None:
            return None
        is_pair = isinstance(blend, (list, tuple)) and len(blend) == 2
        if not is_pair or not _are_paths(blend[0]):
            raise ValueError(f"a blend is ([prefix, ...], [weight, ...] or None), got {blend!r}")
        prefixes, weights = blend
        if weights is not None:
            weights = _read_weights(weights, prefixes)
        return prefixes, weights

    def _check_phases(self):
        """blend_phases mixes the corpora of the training blend."""
        blend = self.blend
        if self.blend_per_split is not None:
            blend = self.blend_per_split[Split.train.value]
        if blend is None:
            raise ValueError(
                "blend_phases needs a blend for train: it says which corpora are mixed"
            )
        if self.split_matrix is not None and self.split_matrix[Split.train.value] is None:
            raise ValueError(f"blend_phases mixes train, but split {self.split!r} has no train")
        prefixes, _ = blend
        _as_phases(self.blend_phases, prefixes)


def _are_paths(prefixes):
    """Is this a list of at least one path, and of nothing else?"""
    if isinstance(prefixes, str) or not hasattr(prefixes, "__len__") or len(prefixes) == 0:
        return False
    return all(isinstance(path, (str, os.PathLike)) for path in prefixes)


@dataclasses.dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """The config of GPTDataset.  These fields come on top of those of the base class:

    reset_position_ids       positions restart after every eod token (None is False)
    reset_attention_mask     no token attends across an eod token
    eod_mask_loss            no loss where the input token is eod
    create_attention_mask    return the dense (1, S, S) mask, which says what may attend to what
    drop_last_partial_validation_sequence   False: the last, short sample of valid is kept, padded
    add_extra_token_to_sequence             x = 1: the last input token has a label too
    object_storage_cache_path               local folder for copies of .idx files: section 13
    data_parallel_size, sequence_parallel_size, sequences_per_dataset, context_parallel_size
                             accepted as upstream's; nothing here depends on them
    hybrid_context_parallel  of upstream; True is refused
    inter_document_masking   instead of a mask, return where the documents of a sample start, as
                             attention kernels for packed sequences want it: cu_seqlens has these
                             places and then S in all entries that are left, max_seqlen is the
                             length of the longest; positions restart at each start (keyword only,
                             since the config of upstream 0.16.1 does not have it)
    stable_order             not of upstream: shuffle each epoch by itself, so that a longer dataset
                             begins with the shorter one (section 4)

    >>> GPTDatasetConfig(1234, 4, blend=(["p1", "p2"], [1, -1]), split="98,1,1")
    Traceback (most recent call last):
    ValueError: weight of p2: wanted a finite number >= 0, got -1
    """

    reset_position_ids: bool | None = None
    reset_attention_mask: bool | None = None
    eod_mask_loss: bool | None = None
    create_attention_mask: bool = True
    drop_last_partial_validation_sequence: bool = True
    add_extra_token_to_sequence: bool = True
    object_storage_cache_path: str | None = None
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    hybrid_context_parallel: bool = False
    sequences_per_dataset: dict | None = None
    token_dtype_code: int | None = dataclasses.field(init=False, default=None)
    context_parallel_size: int | None = None
    inter_document_masking: bool = dataclasses.field(default=False, kw_only=True)
    stable_order: bool = dataclasses.field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None:
            raise ValueError("a GPTDatasetConfig needs a tokenizer, for its eod")
        if self.hybrid_context_parallel:
            raise ValueError(
                "hybrid_context_parallel is not supported: use inter_document_masking, and cut "
                "batches with get_batch_on_this_cp_rank()"
            )
        if self.reset_attention_mask and not self.has_dense_mask:
            raise ValueError(
                "reset_attention_mask has no effect without a dense mask: set "
                "create_attention_mask, or use inter_document_masking alone"
            )

    @property
    def has_dense_mask(self) -> bool:
        """Does a sample hold a (1, S, S) attention mask?"""
        return bool(self.create_attention_mask and not self.inter_document_masking)


# ==============================================================================
# 4. Three orders
# ==============================================================================
# Question answered here: in which order do documents and samples come, and where does each start?
#
# (1) document_index: the documents of the split (sequences of the pair, see section 3), once for
#     each epoch, shuffled.  Laid end to end in this order they are the stream.
# (2) sample_index: the stream is cut into samples of S tokens; row j says where sample j starts.
# (3) shuffle_index: the samples are shuffled too: sample k of the dataset is sample
#     shuffle_index[k] of the stream.
#
# The cut (2), for a stream of the documents as they are, unshuffled; its rows (d, offset) are
# (0, 0) (1, 0) (2, 1) (2, 5), of which the last says where sample 3 would start:
#
#   position  0 1 2 3 4 5 6 7 8 9 ...      sample 0 = a a a a b    inputs a a a a   labels a a a b
#   stream    a a a a b b b c c c c c c    sample 1 = b b b c c    inputs b b b c   labels b b c c
#                                          sample 2 = c c c c c    inputs c c c c   labels c c c c
#
# With S = 4 and x = 1 a sample is five tokens: four inputs, and one token more, so that the last
# input has a label too.  The next sample begins with that token, so no token is a label twice, and
# of the tokens in samples only the first one of the stream is never a label.
#
# The shuffles (1) and (3) exist in two kinds.  Upstream's shuffles all epochs as one pile, or all
# but the last.  So the order depends on how many samples are asked for: a run that is made longer
# meets another order from its first sample on.  With stable_order each epoch is a pile of its own,
# drawn with a seed of its own, so epochs that are added change nothing before them:
#
#   documents 0 1 2, seed 1234    upstream              stable_order
#   1 epoch                       0 1 2                 0 1 2
#   2 epochs                      2 1 2 0 1 0           0 1 2 | 1 0 2
#   3 epochs                      2 2 1 0 1 1 2 0 0     0 1 2 | 1 0 2 | 1 2 0
#
# The samples (3) are shuffled in the same piles.  A sample that begins in one epoch and ends in the
# next belongs to the pile of the epoch in which it ends.


def count_samples(
    tokens: int,
    sequence_length: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> int:
    """Count the samples in a stream of so many tokens, in exact integers.

    sequence_length              S, inputs of a sample
    drop_last_partial_sequence   False: tokens that fill no whole sample make a short one
    add_extra_token_to_sequence  True: a sample needs one token more than S, which it shares

    >>> count_samples(13, 4), count_samples(14, 4, drop_last_partial_sequence=False)
    (3, 4)
    """
    inputs = max(0, tokens - int(add_extra_token_to_sequence))
    whole, rest = divmod(inputs, sequence_length)
    if rest and not drop_last_partial_sequence:
        return whole + 1
    return whole


class EpochPlan(typing.NamedTuple):
    """How often a dataset goes over its documents; see plan_epochs()."""

    num_epochs: int  # E
    num_samples: int  # N, all that these epochs hold: at least as many as were wanted
    separate_final_epoch: bool  # is the last epoch shuffled by itself?
    samples_before_final_epoch: int  # samples that end before the last epoch begins; 0 if E is 1


def plan_epochs(
    tokens_per_epoch: int,
    num_samples: int | None,
    sequence_length: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> EpochPlan:
    """Find how many epochs give the wanted num_samples (None: the samples of one epoch).

    The number of epochs E is the least from 1 on with E*T >= num_samples*S + x.

    A run reads only the first num_samples of the shuffled samples.  If the last epoch were shuffled
    together with the others, its samples would take the places of samples of earlier epochs, which
    the run then would not read at all.  So where fewer than 80 % of the samples of the last epoch
    are wanted (80 % rounded down to whole samples, as upstream has it), that epoch is shuffled by
    itself and comes last.

    ValueError for samples of a split without tokens (upstream never returns).  Cost: O(1).
    Upstream: GPTDataset._get_num_epochs.

    >>> plan = plan_epochs(13, 4, 4)                # 13 tokens hold 3 samples of 4 + 1 tokens
    >>> plan.num_epochs, plan.num_samples, plan.separate_final_epoch
    (2, 6, True)
    """
    S = sequence_length
    x = int(add_extra_token_to_sequence)
    if num_samples is not None and num_samples < 0:
        raise ValueError(f"wanted num_samples >= 0, got {num_samples}")
    if num_samples and not tokens_per_epoch:
        raise ValueError(f"{num_samples} samples are wanted of a split that holds no tokens")
    num_epochs = 1
    if num_samples:
        num_epochs = _ceil_div(num_samples * S + x, tokens_per_epoch)
    all_tokens = num_epochs * tokens_per_epoch
    all_samples = count_samples(all_tokens, S, drop_last_partial_sequence, x)
    if num_epochs == 1:
        return EpochPlan(1, all_samples, False, 0)
    before_final = count_samples(all_tokens - tokens_per_epoch, S, True, x)
    wanted_of_final = num_samples - before_final
    samples_per_epoch = (tokens_per_epoch - x) // S
    separate = wanted_of_final < int(0.80 * samples_per_epoch)
    return EpochPlan(num_epochs, all_samples, separate, before_final)


def _ceil_div(a, b):
    """The least whole number that is at least a / b, without the rounding of a float."""
    return -(-a // b)


def shuffle(items: np.ndarray, random_state: np.random.RandomState) -> None:
    """Shuffle a 1-D array in place, as numpy does.

    This is a function of its own so that section 16 can put a faster one with the same result in
    its place.  For i = n-1 down to 1, items i and j change places, where j is uniform in 0 .. i.
    Cost: O(n); no copy of the array is made.

    >>> items = np.arange(6, dtype=np.int32)
    >>> shuffle(items, np.random.RandomState(1234)); items.tolist()
    [2, 1, 5, 0, 4, 3]
    """
    random_state.shuffle(items)


def build_document_index(
    documents: typing.Any,
    num_epochs: int,
    random_state: np.random.RandomState,
    separate_final_epoch: bool,
) -> np.ndarray:
    """Repeat the documents for each epoch and shuffle them, the last epoch by itself if asked.

    documents   int32 (D,)   numbers of the split's documents; ValueError if one is 2**31 or more
    Returns     int32 (E*D,)
    Upstream    _build_document_index.  Epochs that are shuffled together are one pile: a document
                may come twice before another one comes once.

    >>> build_document_index([0, 1, 2], 2, np.random.RandomState(1234), False).tolist()
    [2, 1, 2, 0, 1, 0]
    """
    document_index = _repeat_documents(documents, num_epochs)
    if not separate_final_epoch:
        shuffle(document_index, random_state)
        return document_index
    edge = len(document_index) - len(documents)
    shuffle(document_index[:edge], random_state)
    shuffle(document_index[edge:], random_state)
    return document_index


def _repeat_documents(documents, num_epochs):
    """The documents once for each epoch, int32; ValueError for a number that does not fit."""
    documents = np.asarray(documents)
    if len(documents) and documents.max() >= 2**31:
        raise ValueError(f"document {documents.max()}: document_index is int32, below 2**31")
    return np.tile(np.asarray(documents, np.int32), num_epochs)


def build_sample_idx(
    sizes: np.ndarray,
    document_indices: np.ndarray,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> np.ndarray:
    """Find where every sample starts in the stream: the documents laid end to end.

    Sample k is the tokens [k*S, k*S + S + x) of the stream.  With x = 1 its last token is a label
    only, and the first input of sample k+1.

    sizes             int32 (sequences of the file,)  tokens in each
    document_indices  int32 (E*D,)                    document_index, under upstream's name here;
                                                      not the document_indices of the .idx file.
                                                      Entry d is the sequence of the file that
                                                      comes d-th in the stream
    sequence_length   int >= 1                        S, without the extra token
    tokens_per_epoch  int                             the stream has num_epochs times as many
    drop_last_partial_sequence                        False: the stream ends in a short sample if
                                                      its tokens fill no whole one
    Returns           int32 (N+1, 2); int64 from E*D = 2**31 on.  Row k is (d, offset): sample k
                      starts at place offset of the d-th document.  Row N is where sample N
                      would start.
    Raises            ValueError                      S < 1, or a stream too short for its samples
                      IndexError                      an entry of document_indices is no sequence
                      TypeError                       an array of another dtype
    Cost              O(N log(E*D) + E*D) time; in C O(N + E*D), and 8 bytes for each row
    Upstream          helpers.build_sample_idx.  One thing differs: where a last, short sample is
                      kept, upstream computes N in float32.  One thing is kept: with x = 0, a sample
                      k > 0 that starts at the first token of a document gets the row (d, length of
                      d), where d is the first document that ends there.

    >>> sizes = np.array([4, 3, 6], np.int32)               # aaaa bbb cccccc
    >>> build_sample_idx(sizes, np.arange(3, dtype=np.int32), 4, 1, 13).tolist()
    [[0, 0], [1, 0], [2, 1], [2, 5]]
    """
    S = sequence_length
    x = int(add_extra_token_to_sequence)
    num_samples, tokens_needed = _measure_stream(
        sizes, document_indices, S, num_epochs, tokens_per_epoch, drop_last_partial_sequence, x
    )
    lengths = _lengths_of_documents(sizes, document_indices)
    ends = np.cumsum(lengths, dtype=np.int64)  # tokens up to the end of each document
    starts = ends - lengths
    if len(ends) and ends[-1] < tokens_needed:
        raise ValueError(f"the samples need {tokens_needed} tokens, the documents hold {ends[-1]}")

    # Row 0 is (0, 0).  Row k > 0 comes from the end of sample k - 1: when that sample is complete,
    # tokens_read[k - 1] tokens of the stream have been read, and the last of them is in document d.
    tokens_read = np.arange(1, num_samples + 1) * S + x
    if num_samples:
        tokens_read[-1] = tokens_needed  # the last sample may be short
    d = np.searchsorted(ends, tokens_read)  # the first document that ends there or later
    rows = np.zeros((num_samples + 1, 2), _sample_index_dtype(len(document_indices)))
    rows[1:, 0] = d
    # Sample k begins x tokens before that point: with x = 1 at the last token of sample k - 1, with
    # x = 0 right behind it, and that may be the place behind the last token of document d.
    rows[1:, 1] = tokens_read - x - starts[d]
    if tokens_needed < num_samples * S and not x:  # x = 0, and the last sample is short
        # rows[-1] is the first document that ends there; upstream has the last one, if it is empty
        rows[-1] = _end_of_stream(sizes, document_indices)
    return rows


def _measure_stream(sizes, documents, S, num_epochs, tokens_per_epoch, drop_last, x):
    """N, and how many tokens of the stream N samples need; errors for wrong arguments."""
    _check_array(sizes, "sizes", np.int32)
    _check_array(documents, "document_indices", np.int32)
    if not 1 <= operator.index(S) < 2**32:
        raise ValueError(f"sequence_length must be 1 to 2**32 - 1, got {S}")
    tokens = int(num_epochs) * int(tokens_per_epoch)
    if num_epochs < 0 or not 0 <= tokens <= len(documents) * 2**31:
        raise ValueError(f"{len(documents)} documents cannot hold {tokens} tokens")
    num_samples = count_samples(tokens, S, drop_last, x)
    return num_samples, min(tokens, num_samples * S + x)


def _check_array(values, name, dtype):
    """A 1-D array of this dtype; TypeError or ValueError."""
    found = getattr(values, "dtype", type(values).__name__)
    if found != dtype:
        raise TypeError(f"{name} must be an array of {np.dtype(dtype)}, got {found}")
    if values.ndim != 1:
        raise ValueError(f"{name} must be 1-D, got shape {values.shape}")


def _lengths_of_documents(sizes, documents):
    """sizes[documents]; IndexError for an entry that is no sequence: numpy would take a -1."""
    wrong = np.flatnonzero((documents < 0) | (documents >= len(sizes)))
    if len(wrong):
        d = wrong[0]
        raise IndexError(f"document_indices[{d}] is {documents[d]} of {len(sizes)} sequences")
    lengths = sizes[documents]
    if len(lengths) and lengths.min() < 0:
        raise ValueError("a size is negative: no sequence has less than 0 tokens")
    return lengths


def _sample_index_dtype(num_documents):
    """int32, or int64 where d does not fit.  Sizes are int32, so the offsets always fit."""
    return np.int32 if num_documents < 2**31 else np.int64


def _end_of_stream(sizes, documents):
    """The place behind the last token, as a row: (the last document, its length)."""
    return len(documents) - 1, sizes[documents[-1]]


def build_shuffle_index(
    num_samples: int, total_size: int, random_state: np.random.RandomState
) -> np.ndarray:
    """Return 0 .. total_size - 1, the first num_samples of these shuffled, then the rest shuffled.

    uint32, or int64 from total_size = 2**32 - 2 on.  Upstream: _build_shuffle_index.

    >>> build_shuffle_index(3, 6, np.random.RandomState(3)).tolist()     # 0 1 2 stay before 3 4 5
    [1, 0, 2, 3, 5, 4]
    """
    shuffle_index = np.arange(total_size, dtype=_shuffle_index_dtype(total_size))
    shuffle(shuffle_index[:num_samples], random_state)
    shuffle(shuffle_index[num_samples:], random_state)
    return shuffle_index


def _shuffle_index_dtype(total_size):
    """The dtype that upstream has for numbers of samples below total_size."""
    return np.uint32 if total_size < 2**32 - 2 else np.int64


def build_stable_orders(
    documents: typing.Any, sample_edges: typing.Sequence[int], random_seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle each epoch by itself: its documents, then the samples that end in it.

    This is the order of stable_order, instead of build_document_index() and build_shuffle_index().
    Epoch 0 is drawn with random_seed, as upstream's if it is the only one; epoch e > 0 is drawn
    with [random_seed, e].

    documents     int32 (D,)   numbers of the split's documents
    sample_edges  E + 1 ints   epoch e has the samples sample_edges[e] .. sample_edges[e + 1] - 1 of
                               the stream, see count_samples_of_epochs()
    random_seed   int          0 to 2**32 - 1
    Returns       document_index, int32 (E*D,), and shuffle_index, uint32 or int64 (N,)
    Cost          that of the shuffles, and less than 1 ms for each epoch

    >>> for sample_edges in [0, 3], [0, 3, 6], [0, 3, 6, 9]:          # 1, 2 and 3 epochs
    ...     document_index, shuffle_index = build_stable_orders([0, 1, 2], sample_edges, 1234)
    ...     print(document_index.tolist(), shuffle_index.tolist())
    [0, 1, 2] [1, 2, 0]
    [0, 1, 2, 1, 0, 2] [1, 2, 0, 4, 3, 5]
    [0, 1, 2, 1, 0, 2, 1, 2, 0] [1, 2, 0, 4, 3, 5, 6, 8, 7]
    """
    num_documents = len(documents)
    num_epochs = len(sample_edges) - 1
    document_index = _repeat_documents(documents, num_epochs)
    num_samples = sample_edges[-1]
    shuffle_index = np.arange(num_samples, dtype=_shuffle_index_dtype(num_samples))
    random_state = np.random.RandomState(random_seed)
    for epoch in range(num_epochs):
        if epoch > 0:
            random_state.seed([random_seed, epoch])
        first_document = epoch * num_documents
        shuffle(document_index[first_document : first_document + num_documents], random_state)
        shuffle(shuffle_index[sample_edges[epoch] : sample_edges[epoch + 1]], random_state)
    return document_index, shuffle_index


def count_samples_of_epochs(
    plan: EpochPlan,
    tokens_per_epoch: int,
    sequence_length: int,
    add_extra_token_to_sequence: bool = True,
) -> list[int]:
    """Count the samples that end before epoch 0, 1, ..., E begins: E + 1 numbers, the last is N.

    A last, short sample ends in the last epoch.  In a longer dataset a whole sample stands in its
    place and ends in the next epoch, so where short samples are kept, the last epoch of the shorter
    dataset is another one in the longer dataset; all epochs before it are equal.

    >>> count_samples_of_epochs(plan_epochs(13, 9, 4), 13, 4)     # 13, 26, 39 tokens
    [0, 3, 6, 9]
    """
    edges = []
    for epoch in range(plan.num_epochs):
        tokens = epoch * tokens_per_epoch
        edges.append(count_samples(tokens, sequence_length, True, add_extra_token_to_sequence))
    return [*edges, plan.num_samples]


# ==============================================================================
# 5. GPTDataset
# ==============================================================================
# Question answered here: what are the tokens, labels and masks of sample k?
#
#   k --shuffle_index--> j --sample_index[j], [j + 1]--> (d, offset) .. (d', offset')
#     --document_index[d .. d']--> pieces of sequences in the file pair --joined--> S + x tokens
#
# With the toy corpus, its documents in file order, and sample_index (0, 0) (1, 0) (2, 1) (2, 5):
#
#   positions              0 1 2 3 4 5 6 7 8 9 . . .       j = 1: rows (1, 0) and (2, 1)
#   stream                 a a a a b b b c c c c c c
#   pieces of j = 1                b b b c c               (sequence 1, offset 0, 3 tokens) and
#                                                          (sequence 2, offset 0, 1 + x tokens)
#   tokens                         b b b c                 all but the last of the five
#   labels                           b b c c               all but the first
#
# Where a document ends inside of a sample, the config may ask for positions that count from 0
# again, for a mask that keeps the documents apart, or for the places where documents start.
#
# The three arrays depend on the lengths of the documents, the split, the number of samples, S, x,
# the seed, and whether a last short sample is kept, and on nothing else.  So they are built once
# and cached in files (section 12); every rank and every later job maps the same files into memory.


class MegatronDataset(abc.ABC, torch.utils.data.Dataset):
    """The base of datasets that the builder can build.  Upstream: MegatronDataset.

    dataset        what build_low_level_dataset() returned
    dataset_path   the path it was opened from; may be None
    indices        which elements of dataset belong to this split: an int32 array, or a range
    num_samples    how many samples are wanted; None: those of one epoch
    index_split    Split
    config         BlendedMegatronDatasetConfig

    A subclass defines
      __len__() and __getitem__(k)                    the samples
      build_low_level_dataset(dataset_path, config)   opens the data, for the builder
      numel_low_level_dataset(opened)                 how many elements there are for the split
    """

    def __init__(
        self,
        dataset: typing.Any,
        dataset_path: str | os.PathLike | None,
        indices: np.ndarray | range,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = None if dataset_path is None else os.fspath(dataset_path)
        self.indices = indices
        self.num_samples = None if num_samples is None else int(num_samples)
        self.index_split = index_split
        self.config = config
        self._pad_token_id = _pad_token_id(config)
        # what tells this dataset from others: the name of its cache files is made from it
        self.unique_identifiers = collections.OrderedDict()
        self.unique_identifiers["class"] = type(self).__name__
        self.unique_identifiers["dataset_path"] = self.dataset_path
        self.unique_identifiers["num_samples"] = self.num_samples
        self.unique_identifiers["index_split"] = index_split.name
        for name in self._key_config_attributes():
            self.unique_identifiers[name] = getattr(config, name)
        self._describe()

    def _describe(self):
        """Set the text of the identifiers, which upstream keeps with a cache, and its md5."""
        self.unique_description = describe(self.unique_identifiers)
        self.unique_description_hash = _md5(self.unique_description)

    @property
    def indices(self) -> np.ndarray:
        """int32: which elements of dataset belong to this split."""
        if isinstance(self._indices, range):
            # Made when it is asked for, because a loaded cache does without: 4 bytes an element.
            self._indices = np.arange(self._indices.start, self._indices.stop, dtype=np.int32)
        return self._indices

    @indices.setter
    def indices(self, values: np.ndarray | range) -> None:
        """Let these elements belong to this split."""
        self._indices = values if isinstance(values, range) else np.asarray(values)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        """Return the fields of the config that change the samples; a subclass may add some."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: BlendedMegatronDatasetConfig
    ) -> typing.Any:
        """Open the data at dataset_path.  A class that no builder builds can do without."""
        raise NotImplementedError("the builder wants a class with build_low_level_dataset()")

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: typing.Any) -> int:
        """Return how many elements the opened data have for the split to cut."""
        raise NotImplementedError("the builder wants a class with numel_low_level_dataset()")

    def made_from(self) -> dict:
        """Return what the samples are made from, JSON-able: a resumed run must find it again."""
        return {}

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def __getitem__(self, idx: int | None) -> dict:
        """Return sample idx; None stands for a sample that fills up a batch and has no loss."""

    def __getitems__(self, indices: typing.Sequence[int | None]) -> list[dict]:
        """Return several samples; torch.utils.data.DataLoader calls this for each batch."""
        return [self[idx] for idx in indices]

    def batch(self, indices: typing.Sequence[int | None]) -> dict:
        """Return several samples as one: {key: tensor (B, ...)}."""
        return torch.utils.data.default_collate(self.__getitems__(indices))

    def trace(self, k: int) -> list["Span"]:
        """Return which tokens of which documents sample k is made of, if a subclass can tell."""
        raise NotImplementedError(f"{type(self).__name__} cannot tell what sample {k} is made of")

    def find(self, path_prefix: typing.Any, sequence: int | None = None) -> list[int]:
        """Return the samples that hold a token of a sequence, if a subclass can tell."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot tell which samples hold {sequence}"
        )

    @property
    def is_stable(self) -> bool:
        """Does a dataset that is built like this one, for more samples, begin with this one?"""
        return False


class GPTDataset(MegatronDataset):
    """Samples of S tokens, cut from the shuffled documents laid end to end.  Upstream: GPTDataset.

    indexed_dataset   IndexedDataset
    dataset_path      its path prefix, which is part of the name of the cache files
    indexed_indices   int32 (D,), the sequences of this split
    num_samples       at least so many; None: those of one epoch

    ds[k] is a dict of new tensors:
      tokens, labels           int64 (S,)
      attention_mask           bool (1, S, S), True where a token may not attend; if the config
                               wants a mask
      loss_mask                float32 (S,), 0 where a label does not count
      position_ids             int64 (S,)
      cu_seqlens, max_seqlen   int32 (S+1,) and (), only with inter_document_masking
    ds[None] is sample 0 without any loss: it fills up a batch.  Cost: that of build_sample_idx() to
    build; for a sample, one read for each document that it touches.  On object storage the reads of
    a batch are made at the same time.

    The arrays are kept in files in config.path_to_cache.  Its default is a folder beside the pair,
    or, for a pair on object storage, one beside the copy of its .idx.

    A subclass may override the two methods _query_document_sample_shuffle_indices(), the tokens of
    a sample, and _build_document_sample_shuffle_indices(), the three arrays; both names are
    upstream's.  The arrays may also be set, as attributes.

    >>> prefix = toy_corpus()
    >>> config = GPTDatasetConfig(1234, 4, blend=([prefix], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> documents = np.arange(3, dtype=np.int32)
    >>> ds = GPTDataset(IndexedDataset(prefix), prefix, documents, 3, Split.train, config)
    >>> ds.document_index.tolist()  # with this seed the documents happen to stay in order
    [0, 1, 2]
    >>> ds.sample_index.tolist(), ds.shuffle_index.tolist()
    ([[0, 0], [1, 0], [2, 1], [2, 5]], [1, 2, 0])
    >>> ds.pieces(0)                # all of sequence 1, then two tokens of sequence 2
    [(1, 0, 3), (2, 0, 2)]
    >>> ByteTokenizer().detokenize(ds[0]["tokens"]), ByteTokenizer().detokenize(ds[0]["labels"])
    ('bbbc', 'bbcc')
    """

    index_names = ("document_index", "sample_index", "shuffle_index")

    def __init__(
        self,
        indexed_dataset: IndexedDataset,
        dataset_path: str | os.PathLike | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(
            indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config
        )
        # [first, end, digest]: digest is None if the documents are first .. end - 1, in order
        self._documents = _describe_documents(self._indices)
        self._check_low_level_dataset()
        self._extra = int(config.add_extra_token_to_sequence)
        self._keep_partial = (
            index_split is Split.valid and not config.drop_last_partial_validation_sequence
        )
        self._eod_token_id = None
        if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
            self._eod_token_id = _attribute(config.tokenizer, "eod")
            self._warn_if_no_eod()
        self.unique_identifiers.update(self._key_corrections())
        self._describe()
        self._finder = None  # made by the first find()
        self._cache = self._make_cache()
        own = type(self)._build_document_sample_shuffle_indices
        if own is GPTDataset._build_document_sample_shuffle_indices:
            self._open_indices()
        else:
            arrays = self._build_document_sample_shuffle_indices()
            self.document_index, self.sample_index, self.shuffle_index = arrays

    def _check_low_level_dataset(self):
        """The documents exist, document_index can name them, and their tokens are integers."""
        n = len(self.dataset)
        first, end, digest = self._documents
        lowest = first
        highest = end - 1
        if digest is not None:
            lowest = int(self.indices.min())
            highest = int(self.indices.max())
        if lowest < 0 or highest >= n or n >= 2**31:
            raise IndexError(
                f"{_name(self)}: documents {lowest} .. {highest} of {n}, and document_index, "
                f"int32, can name {2**31 - 1}"
            )
        dtype = np.dtype(getattr(self.dataset, "dtype", np.int64))
        if dtype.kind not in "iu":
            raise ValueError(f"{_name(self)} holds {dtype}: token ids must be integers")

    def _warn_if_no_eod(self):
        """Resets find nothing in a corpus that was tokenized without --append-eod."""
        pieces = []
        for i in self.indices[:16].tolist():
            length = int(self.dataset.sequence_lengths[i])
            if length > 0:
                pieces.append((i, length - 1, 1))
        last_tokens = [tokens[0] for tokens in self._read_pieces(pieces)]
        if last_tokens and self._eod_token_id not in last_tokens:
            warnings.warn(
                f"{_name(self)}: none of {len(last_tokens)} documents looked at ends in eod, so "
                "resets and eod_mask_loss find nothing: tokenize with --append-eod?",
                stacklevel=2,
            )

    # ---- the indices

    def _make_cache(self):
        """The cache of the three arrays; no file is opened yet."""
        folder = self.config.path_to_cache
        if not folder and self.dataset_path is not None:
            folder = f"{self._default_cache_folder()}/{type(self).__name__}_indices"
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}"
        return IndexCache(folder, name, self.index_names, self.unique_description, self.made_from())

    def _default_cache_folder(self):
        """Where caches go if the config names no folder: beside the pair, or else the .idx copy."""
        prefix = self.dataset.path_prefix
        if not is_remote(prefix):
            return f"{prefix}/cache"
        storage = self.dataset.object_storage_config
        return ObjectStorageConfig().folder if storage is None else storage.folder

    def _open_indices(self):
        """Load the three arrays from the cache, or build them."""
        self._cache.load_or_build(
            self._build_indices,
            trust=self.config.fast_cache_load,
            defer=self.config.defer_npy_index_mmap,
        )

    def _build_document_sample_shuffle_indices(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return document_index, sample_index and shuffle_index, from the cache or newly built.

        A subclass may override this method, which has upstream's name, to have other orders.  What
        its method returns is kept in memory, and not in a cache.
        """
        self._open_indices()
        return self.document_index, self.sample_index, self.shuffle_index

    def _build_indices(self):
        """Yield the order of documents, where each sample starts among them, the order of samples.

        One by one: the cache writes each while the next one is made.
        """
        config = self.config
        if isinstance(self.dataset, IndexedDataset):
            self.dataset.verify()
        tokens_per_epoch = self.tokens_per_epoch()
        plan = self._plan_epochs(tokens_per_epoch)
        _warn_if_python_is_slow(plan.num_samples + plan.num_epochs * len(self.indices))
        orders = self._draw_orders(plan, tokens_per_epoch)
        document_index = next(orders)
        yield document_index
        yield build_sample_idx(
            self.dataset.sequence_lengths,
            document_index,
            config.sequence_length,
            plan.num_epochs,
            tokens_per_epoch,
            not self._keep_partial,
            self._extra,
        )
        yield next(orders)

    def _plan_epochs(self, tokens_per_epoch):
        """How often this dataset goes over its documents, and how many samples that gives."""
        if self.num_samples and not tokens_per_epoch:
            raise ValueError(
                f"{_name(self)}: {self.index_split.name} of split {self.config.split!r} holds no "
                f"tokens for {self.num_samples} samples: enlarge it"
            )
        S = self.config.sequence_length
        drop_last = not self._keep_partial
        return plan_epochs(tokens_per_epoch, self.num_samples, S, drop_last, self._extra)

    def _draw_orders(self, plan, tokens_per_epoch):
        """Yield the order of documents, then the order of samples."""
        config = self.config
        if config.stable_order:
            edges = count_samples_of_epochs(
                plan, tokens_per_epoch, config.sequence_length, self._extra
            )
            yield from build_stable_orders(self.indices, edges, config.random_seed)
            return
        random_state = np.random.RandomState(config.random_seed)  # it draws both, one by one
        yield build_document_index(
            self.indices, plan.num_epochs, random_state, plan.separate_final_epoch
        )
        first_part = plan.num_samples
        if plan.separate_final_epoch:
            first_part = plan.samples_before_final_epoch
        yield build_shuffle_index(first_part, plan.num_samples, random_state)

    def tokens_per_epoch(self) -> int:
        """Return T: how many tokens the documents of this split have."""
        first, end, digest = self._documents
        lengths = self.dataset.sequence_lengths
        lengths = lengths[first:end] if digest is None else lengths[self.indices]
        return int(lengths.sum(dtype=np.int64))

    @property
    def document_index(self) -> np.ndarray:
        """int32 (E*D,): the order of the documents."""
        return self._cache["document_index"]

    @document_index.setter
    def document_index(self, values: np.ndarray) -> None:
        """Use these documents, in this order."""
        self._cache["document_index"] = values

    @property
    def sample_index(self) -> np.ndarray:
        """int32 or int64 (N+1, 2): where each sample of the stream starts."""
        return self._cache["sample_index"]

    @sample_index.setter
    def sample_index(self, values: np.ndarray) -> None:
        """Use these starts of samples."""
        self._cache["sample_index"] = values

    @property
    def shuffle_index(self) -> np.ndarray:
        """uint32 or int64 (N,): the order of the samples."""
        return self._cache["shuffle_index"]

    @shuffle_index.setter
    def shuffle_index(self, values: np.ndarray) -> None:
        """Use this order of samples."""
        self._cache["shuffle_index"] = values

    # ---- the samples

    def __len__(self) -> int:
        return len(self.sample_index) - 1

    def pieces(self, k: int) -> list[tuple[int, int, int]]:
        """Return where the tokens of sample k are: [(sequence, offset, length), ...], in order.

        A length may be 0: that of an empty document, or, with x = 0, of the first piece.
        """
        k = _position(k, len(self), f"the samples of {_name(self)}")
        j = int(self.shuffle_index[k])
        rows = self._rows(k, j)
        (first_d, _), (last_d, _) = rows
        pieces = []
        for d in range(first_d, last_d + 1):
            i = int(self.document_index[d])
            if not 0 <= i < len(self.dataset):
                raise self._damaged(k, f"document_index[{d}] is {i}")
            begin, end = self._part(rows, d, i)
            pieces.append((i, begin, end - begin))
        return pieces

    def _part(self, rows, d, i):
        """Which tokens of sequence i, the d-th of the stream, are in the sample with these rows."""
        (first_d, first_offset), (last_d, last_offset) = rows
        begin = first_offset if d == first_d else 0
        if d < last_d:
            return begin, int(self.dataset.sequence_lengths[i])
        return begin, last_offset + self._extra  # with x = 1 the next sample's first token too

    def trace(self, k: int) -> list["Span"]:
        """Return which tokens of which documents sample k is made of, in order (section 20)."""
        return trace_sample(self, k)

    def find(self, path_prefix: str | os.PathLike | int, sequence: int | None = None) -> list[int]:
        """Return the samples that hold at least one token of a sequence of the pair, in order.

        find(sequence) and find(path_prefix, sequence) are the same; the prefix must be that of the
        pair, else ValueError.  IndexError if the pair has no such sequence.  The first call inverts
        the orders (section 20); each further one takes a few binary searches for each epoch.
        """
        if sequence is None:
            sequence = path_prefix
        elif os.fspath(path_prefix) != self.dataset_path:
            raise ValueError(f"{path_prefix} is not the pair of this dataset, {self.dataset_path}")
        if self._finder is None:
            self._finder = SampleFinder(self)
        return self._finder.find(sequence)

    def _rows(self, k, j):
        """Rows j and j + 1 of sample_index; IndexError where they are not the ends of a sample."""
        most = len(self.sample_index) - 1  # a subclass may have a smaller len()
        if not 0 <= j < most:
            raise self._damaged(k, f"shuffle_index[{k}] is {j}, of {most} samples")
        rows = self.sample_index[j : j + 2].tolist()
        (first_d, first_offset), (last_d, last_offset) = rows
        is_in_order = 0 <= first_d <= last_d < len(self.document_index)
        if not is_in_order or first_offset < 0 or last_offset < 0:
            found = f"rows {j} and {j + 1} of sample_index are {rows}"
            raise self._damaged(k, f"{found}, of {len(self.document_index)} documents")
        return rows

    def _damaged(self, k, found):
        """The error for indices that no builder has made."""
        return IndexError(f"{_name(self)}: sample {k}: {found}: rebuild the cache")

    def _query_document_sample_shuffle_indices(self, idx: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of sample idx, int64 (S + x,), and the sequences they are from.

        A subclass may override this method, which has upstream's name, to change the tokens.  If it
        returns fewer than S + x of them, padding follows.
        """
        pieces = self.pieces(idx)
        token_ids = self._join(idx, pieces, self._read_pieces(pieces))
        return token_ids, np.array([i for i, _, _ in pieces], np.int64)

    def _read_pieces(self, pieces):
        """The tokens of each piece, in one call where the corpus allows that."""
        if self._reads_many():
            return self.dataset.get_many(pieces)
        return [self.dataset.get(i, offset, length) for i, offset, length in pieces]

    def _reads_many(self):
        """Is this a corpus whose get() is ours, and returns nothing but tokens?"""
        corpus = self.dataset
        if not isinstance(corpus, IndexedDataset) or corpus.multimodal:
            return False
        return getattr(corpus.get, "__func__", None) is IndexedDataset.get

    def _join(self, idx, pieces, parts):
        """The tokens of the pieces of sample idx, laid end to end and filled up to S + x."""
        token_ids = np.concatenate(parts, dtype=np.int64)
        wanted = sum(length for _, _, length in pieces)
        if len(token_ids) != wanted:  # a reader of the user's own may be wrong
            raise ValueError(
                f"{_name(self)}: wanted {wanted} tokens of {pieces}, got {len(token_ids)}"
            )
        if (token_ids == self._pad_token_id).any():
            self._warn_of_real_pads()
        return self._pad(idx, token_ids)

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        if idx is None:
            sample = self[0]
            sample["loss_mask"].zero_()
            return sample
        token_ids, _ = self._query_document_sample_shuffle_indices(idx)
        return self._make_sample(idx, token_ids)

    def __getitems__(self, indices: typing.Sequence[int | None]) -> list[dict]:
        """Return several samples; where the corpus is not mapped, all are read in one call.

        A subclass that has its own __getitem__() or _query_document_sample_shuffle_indices() is
        asked for one sample after the other.
        """
        if not self._reads_batches():
            return super().__getitems__(indices)
        pieces_of_samples = []
        pieces_of_batch = []
        for idx in indices:
            pieces = self.pieces(0 if idx is None else idx)
            pieces_of_samples.append(pieces)
            pieces_of_batch.extend(pieces)
        parts = iter(self.dataset.get_many(pieces_of_batch))
        samples = []
        for idx, pieces in zip(indices, pieces_of_samples, strict=True):
            k = 0 if idx is None else idx
            token_ids = self._join(k, pieces, [next(parts) for _ in pieces])
            sample = self._make_sample(k, token_ids)
            if idx is None:
                sample["loss_mask"].zero_()
            samples.append(sample)
        return samples

    def _reads_batches(self):
        """Does it serve to read a whole batch at once, and are the samples those of this class?"""
        cls = type(self)
        query = GPTDataset._query_document_sample_shuffle_indices
        if cls.__getitem__ is not GPTDataset.__getitem__:
            return False
        if cls._query_document_sample_shuffle_indices is not query:
            return False
        return self._reads_many() and not self.dataset.is_mapped

    def _make_sample(self, idx, token_ids):
        """The tensors of sample idx, which has these tokens."""
        config = self.config
        S = config.sequence_length
        padded = self._pad(idx, token_ids)
        tokens = padded[:S].copy()
        labels = padded[1:].copy()
        if not self._extra:
            labels = np.append(labels, self._pad_token_id)

        # the places of the sample where positions count from 0 again
        after_eod = self._starts_after_eod(tokens)
        starts = [0]
        if config.inter_document_masking:
            starts = self._starts_of_pieces(idx)
        elif config.reset_position_ids:
            starts = after_eod

        sample = {"tokens": tokens, "labels": labels}
        if config.has_dense_mask:
            mask_starts = after_eod if config.reset_attention_mask else [0]
            sample["attention_mask"] = causal_mask(mask_starts, S)
        sample["loss_mask"] = self._loss_mask(tokens, labels)
        sample["position_ids"] = positions_from(starts, S)
        if config.inter_document_masking:
            # the places, then S: the end of the last document, and of empty ones behind it
            sample["cu_seqlens"] = np.full(S + 1, S, np.int32)
            sample["cu_seqlens"][: len(starts)] = starts
            sample["max_seqlen"] = np.array(np.diff([*starts, S]).max(), np.int32)
        tokens[tokens == self._pad_token_id] = 0  # the model must be able to look the ids up
        labels[labels == self._pad_token_id] = 0
        return {key: torch.from_numpy(values) for key, values in sample.items()}

    def _pad(self, idx, token_ids):
        """The tokens of a sample, filled up to S + x."""
        wanted = self.config.sequence_length + self._extra
        if len(token_ids) == wanted:
            return np.asarray(token_ids, np.int64)
        if len(token_ids) > wanted:
            raise self._damaged(idx, f"wanted {wanted} tokens, got {len(token_ids)}")
        padded = np.full(wanted, self._pad_token_id, np.int64)
        padded[: len(token_ids)] = token_ids
        return padded

    def _warn_of_real_pads(self):
        """Upstream is silent; Python shows equal warnings once."""
        warnings.warn(
            f"{_name(self)}: real tokens equal the pad id {self._pad_token_id}: they become 0 "
            "without loss, as in Megatron-LM",
            stacklevel=2,
        )

    def _loss_mask(self, tokens, labels):
        """1 for each label that is no padding, and, if the config says so, does not follow eod."""
        loss_mask = (labels != self._pad_token_id).astype(np.float32)
        if self.config.eod_mask_loss:
            loss_mask[tokens == self._eod_token_id] = 0
        return loss_mask

    def _starts_after_eod(self, tokens):
        """The places among the inputs where a document starts: 0, and behind each eod token."""
        if self._eod_token_id is None:
            return [0]
        eods = np.flatnonzero(tokens[:-1] == self._eod_token_id)
        return [0, *(eods + 1).tolist()]

    def _starts_of_pieces(self, idx):
        """The places among the inputs where a piece starts; empty pieces have no place."""
        starts = [0]
        size = 0
        for _, _, length in self.pieces(idx):
            if length and 0 < size < self.config.sequence_length:
                starts.append(size)
            size += length
        return starts

    # ---- what the arrays are made from, for the cache and for resuming

    @property
    def is_stable(self) -> bool:
        """Does this dataset, built for more samples, begin with all samples that it has now?

        It does with stable_order, unless a last, short sample is kept: with more samples that one
        would be whole, and the last epoch would be shuffled with one sample fewer.
        """
        return self.config.stable_order and not self._keep_partial

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> IndexedDataset:
        """Open the pair at dataset_path."""
        if dataset_path is None:
            raise ValueError("no blend is given: give one, or build MockGPTDataset")
        check = False if config.fast_cache_load else None
        storage = ObjectStorageConfig(config.object_storage_cache_path)
        return IndexedDataset(dataset_path, False, config.mmap_bin_files, storage, check)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of sequences of the file."""
        return len(low_level_dataset)

    def _key_corrections(self):
        """What the arrays depend on and upstream's identifiers leave out; usually nothing.

        The name of the cache files is the md5 of the identifiers.  Upstream leaves some settings
        out, so that datasets that differ share their files.  Here such a setting is an identifier
        too where it differs from its default; so with all defaults the name is upstream's.
        """
        corrections = {}
        if not self._extra:
            corrections["add_extra_token_to_sequence"] = False
        if self._keep_partial:
            corrections["drop_last_partial_validation_sequence"] = False
        if self._documents != self._documents_of_split():
            corrections["documents"] = self._documents
        if self.config.stable_order:
            corrections["stable_order"] = True
        return corrections

    def _documents_of_split(self):
        """What _documents is if this dataset has just the documents of its split."""
        bounds = (0, 1)  # blend_per_split: its corpora belong to their split as a whole
        if self.config.split_matrix:
            # None is an empty split, of which the builder makes no dataset.  For a dataset that is
            # made by hand any fixed bounds will do: other documents become part of the name.
            in_matrix = self.config.split_matrix[self.index_split.value]
            if in_matrix is not None:
                bounds = in_matrix
        first, end = split_range(bounds, len(self.dataset))
        if first == end:
            return [0, 0, None]
        return [first, end, None]

    def made_from(self) -> dict:
        """Return what the arrays are made from, for the manifest of the cache (section 12)."""
        found = {
            "documents": self._documents,
            "keep_partial": self._keep_partial,
            "extra_token": self._extra,
        }
        if self.config.stable_order:
            found["stable_order"] = True
        if isinstance(self.dataset, IndexedDataset):
            found |= self.dataset.identity()
        return found

    def __getstate__(self):
        """Leave out of a pickle what can be made anew.

        That is the finder, and the numbers of the documents where first and end say them all.
        """
        state = self.__dict__.copy()
        state["_finder"] = None
        first, end, digest = self._documents
        if digest is None:
            state["_indices"] = range(first, end)
        return state


def causal_mask(starts: typing.Sequence[int], sequence_length: int) -> np.ndarray:
    """Return the mask of one sample, bool (1, S, S): True where row i may not attend to column j.

    A token attends to itself and to what comes before it in its own document; starts are the places
    where documents begin.  Cost: S * S bytes.  Upstream: part of _get_ltor_masks_and_position_ids.

    >>> causal_mask([0, 2], 4)[0].astype(int)          # two documents of two tokens
    array([[0, 1, 1, 1],
           [0, 0, 1, 1],
           [1, 1, 0, 1],
           [1, 1, 0, 0]])
    """
    mask = np.triu(np.ones((sequence_length, sequence_length), bool), 1)  # the future
    if len(starts) > 1:
        lengths = np.diff([*starts, sequence_length])
        document = np.repeat(np.arange(len(starts)), lengths)
        mask |= document[:, None] != document[None, :]
    return mask[None]


def positions_from(starts: typing.Sequence[int], sequence_length: int) -> np.ndarray:
    """Return the position of each token in its document, int64 (S,).

    starts are the places where documents begin.  Upstream: part of
    _get_ltor_masks_and_position_ids.

    >>> positions_from([0, 2], 5).tolist()
    [0, 1, 0, 1, 2]
    """
    positions = np.arange(sequence_length)
    if len(starts) > 1:
        lengths = np.diff([*starts, sequence_length])
        positions -= np.repeat(starts, lengths)
    return positions


def _describe_documents(indices):
    """Numbers of documents -> [first, end, None] if they are all of first .. end - 1, in order.

    Otherwise the third entry is a digest of the numbers.
    """
    if len(indices) == 0:
        return [0, 0, None]
    first = int(indices[0])
    end = int(indices[-1]) + 1
    if isinstance(indices, range):
        return [first, end, None]
    if end - first == len(indices) and np.all(indices[1:] > indices[:-1]):
        return [first, end, None]
    return [first, end, _md5(str(indices.tolist()))]


def _name(dataset):
    """What to call a dataset in a message: its path, or its class."""
    path = getattr(dataset, "dataset_path", None)
    return type(dataset).__name__ if path is None else hide_credentials(str(path))


def _attribute(tokenizer, name):
    """An attribute of a tokenizer; None if there is none, or if it says NotImplementedError."""
    try:
        return getattr(tokenizer, name, None)
    except NotImplementedError:
        return None


def _pad_token_id(config):
    """The id that fills short samples: the tokenizer's pad, or -1.

    It is -1 if there is no pad.  It is -1 too if another special token has the same id, unless the
    config says allow_ambiguous_pad_tokens: padding has no loss, so real tokens of that id would
    have no loss either.  The special tokens are those of the tokenizer's special_tokens_dict; if it
    has none, they are eos and eod.
    """
    tokenizer = config.tokenizer
    pad = _attribute(tokenizer, "pad")
    if pad is None:
        return -1
    special = _attribute(tokenizer, "special_tokens_dict")
    if special is None:
        special = {}
    special = {name: token for name, token in special.items() if name != "pad_token"}
    if not special:
        special = {name: _attribute(tokenizer, name) for name in ("eos", "eod")}
    same = [name for name, token in special.items() if token == pad]
    if same and not config.allow_ambiguous_pad_tokens:
        warnings.warn(
            f"the pad id {pad} is also the tokenizer's {' and '.join(same)}: padding is -1, so "
            "that real tokens keep their loss (see allow_ambiguous_pad_tokens)",
            stacklevel=2,
        )
        return -1
    return int(pad)


class MockGPTLowLevelDataset:
    """Sequence i is 1, 2, ..., length - 1 (mod vocabulary), then eod.  Upstream: the same name.

    >>> sequence = MockGPTLowLevelDataset(ByteTokenizer())[0]
    >>> sequence[:3].tolist(), sequence[-1].item()
    ([1, 2, 3], 256)
    """

    def __init__(self, tokenizer: typing.Any) -> None:
        self.tokenizer = tokenizer
        generator = np.random.default_rng(0)
        self.sequence_lengths = generator.integers(1, 4096, size=100_000, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> np.ndarray:
        numbers_up = np.arange(1, self.sequence_lengths[idx], dtype=np.int64)
        return np.append(numbers_up % self.tokenizer.vocab_size, self.tokenizer.eod)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Return a part of sequence idx, as IndexedDataset.get() does."""
        end = None if length is None else offset + length
        return self[idx][offset:end]


class MockGPTDataset(GPTDataset):
    """Samples of numbers that count up, for speed runs without data.  Upstream: MockGPTDataset.

    dataset and indices are indexed_dataset and indexed_indices of GPTDataset, under the names that
    they have in upstream's class.
    """

    def __init__(
        self,
        dataset: MockGPTLowLevelDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> MockGPTLowLevelDataset:
        """Return 100,000 sequences of 1 to 4,095 tokens; dataset_path is not used."""
        return MockGPTLowLevelDataset(config.tokenizer)


# ==============================================================================
# 6. BlendedDataset
# ==============================================================================
# Question answered here: which dataset, and which of its samples, is sample i of the blend?
#
# Each sample comes from the dataset that is furthest behind its share.
#
#   weights 0.25, 0.75    sample i of the blend    0     1     2     3
#                         lag of dataset 0         .25   .25  -.5   -.25
#                         lag of dataset 1         .75  -.25   .5    .25
#                         dataset_index            1     0     1     1       the largest lag
#                         dataset_sample_index     0     0     1     2       the next of its samples
#
# The lag of a dataset is weight * max(i, 1), minus the samples that it has given before sample i.
# So at any point of the run, each dataset has given nearly its share.
#
# A blend may have phases, each with weights of its own.  In a phase the rule counts from 0 again,
# and each dataset goes on behind its last sample:
#
#   phases                (4, [1, 3])       (4, [1, 1])
#   sample i              0  1  2  3        4  5  6  7
#   dataset_index         1  0  1  1        0  1  0  1
#   dataset_sample_index  0  0  1  2        1  3  2  4
#
# So phases that are added, or changed, leave those before them as they are.


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: typing.Sequence[float],
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill in, for each sample of a blend, its dataset and its place in that dataset.

    Sample i comes from the dataset with the largest lag, weights[d] * max(i, 1) - taken[d], in IEEE
    doubles; taken[d] is how many of the samples 0 .. i-1 come from dataset d.  Of equals the lowest
    d is taken.  max(i, 1) lets sample 0 come from the dataset of the largest weight.

    dataset_index         int16 (size,)             filled in: which dataset
    dataset_sample_index  int64 (size,)             filled in: which of its samples
    weights               float64 (num_datasets,)   shares, whose sum is 1
    verbose               accepted as upstream's; nothing is printed
    Raises                ValueError, TypeError     for arrays and weights that do not fit
    Cost                  O(size * num_datasets); less in C
    Upstream              helpers.build_blending_indices

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_blending_indices(which, sample, [0.25, 0.75], 2, 4)
    >>> which.tolist(), sample.tolist()
    ([1, 0, 1, 1], [0, 0, 1, 2])
    """
    weights = np.array(weights[:num_datasets], np.float64)
    _check_blending(dataset_index, dataset_sample_index, weights, num_datasets, size)
    taken = np.zeros(num_datasets)  # float64, as the lag is computed in doubles
    for i in range(size):
        d = np.argmax(weights * max(i, 1) - taken)
        dataset_index[i] = d
        dataset_sample_index[i] = taken[d]
        taken[d] += 1


def build_exhaustive_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    sizes: typing.Sequence[int],
    num_datasets: int,
) -> None:
    """Fill in a blend that takes sizes[d] samples of each dataset d, mixed evenly.

    The rule is that of build_blending_indices() with the weights sizes[d] / sum(sizes); a dataset
    that has given all its samples does not compete any more.

    dataset_index, dataset_sample_index   int16 and int64, (sum(sizes),): filled in
    sizes                                 int64 (num_datasets,)
    Upstream                              helpers.build_exhaustive_blending_indices

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_exhaustive_blending_indices(which, sample, [1, 3], 2); which.tolist()
    [1, 0, 1, 1]
    """
    sizes = _as_counts(sizes, num_datasets)
    size = sum(sizes.tolist())  # of Python's integers: a sum in int64 might overflow
    _check_blending(dataset_index, dataset_sample_index, sizes, num_datasets, size)
    weights = sizes / np.float64(max(size, 1))
    taken = np.zeros(num_datasets)
    for i in range(size):
        lag = weights * max(i, 1) - taken
        d = np.argmax(np.where(taken < sizes, lag, -np.inf))
        dataset_index[i] = d
        dataset_sample_index[i] = taken[d]
        taken[d] += 1


def _as_counts(sizes, num_datasets):
    """Numbers of samples -> int64 array; ValueError if one is not a whole number."""
    counts = np.array(sizes[:num_datasets], np.int64)
    if not np.array_equal(counts, sizes[:num_datasets]):
        raise ValueError(f"sizes must be whole numbers, got {sizes}")
    return counts


def _check_blending(dataset_index, dataset_sample_index, weights, num_datasets, size):
    """TypeError or ValueError for arguments that the loops above would misread."""
    _check_array(dataset_index, "dataset_index", np.int16)
    _check_array(dataset_sample_index, "dataset_sample_index", np.int64)
    room = min(len(dataset_index), len(dataset_sample_index))
    if not 0 <= size <= room:
        raise ValueError(f"the outputs have {room} places for {size} samples")
    if np.may_share_memory(dataset_index, dataset_sample_index):
        raise ValueError("dataset_index and dataset_sample_index overlap in memory")
    if not 0 < num_datasets < 2**15 - 1 or len(weights) != num_datasets:
        raise ValueError(
            f"num_datasets must be 1 to {2**15 - 2}, each with a weight, got {num_datasets} and "
            f"{len(weights)} weights"
        )
    for d, weight in enumerate(weights.tolist()):
        if not 0 <= weight < math.inf:
            raise ValueError(f"weight of dataset {d}: wanted a finite number >= 0, got {weight}")


def build_phase_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    phases: typing.Sequence[tuple[int, typing.Sequence[float]]],
) -> None:
    """Fill in a blend of several phases.

    In each phase the rule is that of build_blending_indices(), among the datasets whose weight in
    this phase is not 0.  The samples of a dataset are numbered on over all phases.

    dataset_index, dataset_sample_index   int16 and int64, (samples of all phases,): filled in
    phases                                [(samples, weights), ...]; the sum of the weights of a
                                          phase is 1, and each dataset has one
    Cost                                  that of build_blending_indices(), and O(samples)

    >>> which, sample = np.zeros(8, np.int16), np.zeros(8, np.int64)
    >>> build_phase_indices(which, sample, [(4, [0.25, 0.75]), (4, [0.5, 0.5])])
    >>> which.tolist(), sample.tolist()
    ([1, 0, 1, 1, 0, 1, 0, 1], [0, 0, 1, 2, 1, 3, 2, 4])
    """
    if len(phases) == 0:
        raise ValueError("wanted one phase or more, got none")
    _, weights = phases[0]
    taken = np.zeros(len(weights), np.int64)  # of each dataset, in the phases so far
    begin = 0
    for samples, weights in phases:
        end = begin + samples
        used = np.flatnonzero(weights)
        outputs = dataset_index[begin:end], dataset_sample_index[begin:end]
        build_blending_indices(*outputs, np.take(weights, used), len(used), samples)
        taken_before = taken.copy()
        for low in range(begin, end, _CHUNK):
            part = slice(low, min(low + _CHUNK, end))
            d = used[dataset_index[part]]  # the blend numbers those that are used: 0, 1, 2, ...
            dataset_index[part] = d
            dataset_sample_index[part] += taken_before[d]
            taken += np.bincount(d, minlength=len(weights))
        begin = end


class BlendTooLarge(ValueError):
    """A blend asks a dataset for more samples than it has.

    needed is {dataset: samples that the blend takes of it}.
    """

    def __init__(
        self, message: str, needed: dict[torch.utils.data.Dataset, int] | None = None
    ) -> None:
        super().__init__(message)
        self.needed = {} if needed is None else needed


class BlendedDataset(torch.utils.data.Dataset):
    """Several datasets as one, mixed by weights.  Upstream: BlendedDataset.

    datasets   MegatronDatasets of one split, fewer than 32767
    weights    finite numbers >= 0; a dataset of weight 0 is dropped, with a note
    size       number of samples; None: weights are counts, and dataset d gives exactly weights[d]
    config     BlendedMegatronDatasetConfig
    phases     [(samples, weights), ...] instead of weights and size, which must be None.  Every
               dataset keeps its number, also one whose weights are all 0: a phase that is added
               later may use it.  One phase without a weight of 0 is the plain blend.

    After that ds.phases is such a list, with normalized weights, for a blend of one phase too; it
    is None where the weights are counts.  ds.weights is None where phases have weights.

    ds[i] is {"dataset_id": int16, **the sample}; ds[None] fills up a batch, without loss.  Cost: 10
    bytes for each sample, and the time of build_blending_indices() where no cache has the arrays.
    BlendTooLarge (a ValueError) is raised where upstream would fail in the middle of a run.  Where
    fast_cache_load trusts a cache, the samples are not counted, so that no file is read.

    >>> config = GPTDatasetConfig(1234, 4, split="1", tokenizer=ByteTokenizer())
    >>> corpus = IndexedDataset(toy_corpus())
    >>> documents = np.arange(3, dtype=np.int32)
    >>> part = GPTDataset(corpus, corpus.path_prefix, documents, 3, Split.train, config)
    >>> blend = BlendedDataset([part, part], [1, 3], 4, config)
    >>> blend.dataset_index.tolist(), blend.dataset_sample_index.tolist()
    ([1, 0, 1, 1], [0, 0, 1, 2])
    """

    index_names = ("dataset_index", "dataset_sample_index")

    def __init__(
        self,
        datasets: typing.Sequence[MegatronDataset],
        weights: typing.Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
        phases: list | None = None,
    ) -> None:
        if phases is None:
            self._set_weights(datasets, weights, size)
        elif weights is None and size is None:
            self._set_phases(datasets, phases)
        else:
            raise ValueError("phases stand for weights and size: these must be None")
        self.config = config
        self._places = {}  # of the samples of each dataset, made by find()
        self.split = self.datasets[0].index_split
        self._open_indices()
        if not self._cache.is_trusted:
            self._check_counts(self.dataset_index)
        if config.defer_npy_index_mmap:  # the counting has opened files
            for dataset in (self, *self.datasets):
                if hasattr(dataset, "_cache"):
                    dataset._cache.close()

    def _set_weights(self, datasets, weights, size):
        """A blend of one phase, or one whose weights are counts."""
        names = [_name(dataset) for dataset in datasets]
        weights = _read_weights(weights, names)
        if size is None and any(weight != int(weight) for weight in weights):
            raise ValueError(f"without a size the weights are numbers of samples, got {weights}")
        if size is not None and (size < 0 or size % 1):
            raise ValueError(f"wanted a size that is a whole number >= 0, got {size}")
        self.datasets, weights = _drop_zero_weights(datasets, weights, names)
        if size is None:
            self.size = None
            self.weights = [int(weight) for weight in weights]
            self.phases = None
        else:
            self.size = int(size)
            self.weights = normalize(weights)
            self.phases = [(self.size, self.weights)]

    def _set_phases(self, datasets, phases):
        """A blend of several phases; one phase that uses all datasets is a plain blend."""
        self.datasets = list(datasets)
        self.phases = _as_phases(phases, [_name(dataset) for dataset in datasets])
        self.size = sum(samples for samples, _ in self.phases)
        _, weights = self.phases[0]
        is_plain = len(self.phases) == 1 and all(weights)
        self.weights = weights if is_plain else None

    def _open_indices(self):
        """Load the two arrays from the cache, or build them."""
        identifiers = collections.OrderedDict()
        identifiers["class"] = type(self).__name__
        identifiers["datasets"] = [dataset.unique_identifiers for dataset in self.datasets]
        identifiers["split"] = self.split.name
        identifiers["weights"] = self.weights
        identifiers["size"] = self.size
        if self.weights is None:
            identifiers["phases"] = self.phases
        self.unique_identifiers = identifiers
        self.unique_description = describe(identifiers)
        self.unique_description_hash = _md5(self.unique_description)
        name = f"{self.unique_description_hash}-{type(self).__name__}-{self.split.name}"
        self._cache = IndexCache(
            self.config.path_to_cache, name, self.index_names, self.unique_description
        )
        self._cache.load_or_build(self._build_indices, trust=self.config.fast_cache_load)

    def _build_indices(self):
        """Both arrays, filled in by one of the three rules above."""
        _warn_if_python_is_slow(len(self))
        dataset_index = np.zeros(len(self), np.int16)
        dataset_sample_index = np.zeros(len(self), np.int64)
        arrays = [dataset_index, dataset_sample_index]
        if self.size is None:
            build_exhaustive_blending_indices(*arrays, self.weights, len(self.datasets))
        elif self.weights is None:
            build_phase_indices(*arrays, self.phases)
        else:
            build_blending_indices(*arrays, self.weights, len(self.datasets), self.size)
        # not only after they are loaded: fast_cache_load would trust what is saved
        self._check_counts(dataset_index)
        return arrays

    def _check_counts(self, dataset_index):
        """BlendTooLarge if a dataset has fewer samples than the blend takes of it."""
        taken = self._count_taken(dataset_index)
        needed = {}
        sentences = []
        for d, dataset in enumerate(self.datasets):
            if taken[d] > len(dataset):
                needed[dataset] = int(taken[d])
                sentences.append(
                    f"the blend takes {taken[d]:,} samples of {_name(dataset)}, "
                    f"which has {len(dataset):,}"
                )
        if needed:
            raise BlendTooLarge("; ".join(sentences), needed)

    def samples_taken(self) -> np.ndarray:
        """Return how many samples the blend takes of each dataset, int64 (datasets,); O(size)."""
        return self._count_taken(self.dataset_index)

    def _count_taken(self, dataset_index):
        """How often each dataset is in dataset_index; part by part, as it may be mapped."""
        taken = np.zeros(len(self.datasets), np.int64)
        for low in range(0, len(dataset_index), _CHUNK):
            part = dataset_index[low : low + _CHUNK]
            taken += np.bincount(part, minlength=len(self.datasets))
        return taken

    @property
    def dataset_index(self) -> np.ndarray:
        """int16 (size,): which dataset a sample comes from."""
        return self._cache["dataset_index"]

    @dataset_index.setter
    def dataset_index(self, values: np.ndarray) -> None:
        """Use these datasets."""
        self._cache["dataset_index"] = values

    @property
    def dataset_sample_index(self) -> np.ndarray:
        """int64 (size,): which sample of that dataset a sample is."""
        return self._cache["dataset_sample_index"]

    @dataset_sample_index.setter
    def dataset_sample_index(self, values: np.ndarray) -> None:
        """Use these samples of the datasets."""
        self._cache["dataset_sample_index"] = values

    @property
    def is_stable(self) -> bool:
        """Does this blend begin with the same samples where more of them, or phases, are added?"""
        for dataset in self.datasets:
            if not isinstance(dataset, MegatronDataset) or not dataset.is_stable:
                return False
        return self.phases is not None

    def __len__(self) -> int:
        return sum(self.weights) if self.size is None else self.size

    def _place(self, idx: int | None) -> tuple[int, int | None]:
        """Sample idx is sample k of dataset d: return (d, k).  None is padding, of dataset 0."""
        if idx is None:
            return 0, None
        i = _position(idx, len(self), "the samples of a blend")
        return int(self.dataset_index[i]), int(self.dataset_sample_index[i])

    def trace(self, idx: int) -> list["Span"]:
        """Return which tokens of which documents sample idx is made of, in order (section 20)."""
        d, k = self._place(operator.index(idx))
        return self.datasets[d].trace(k)

    def find(self, path_prefix: str | os.PathLike, sequence: int) -> list[int]:
        """Return the samples that hold at least one token of a sequence of a pair, in order.

        ValueError if the blend has no such pair.  The first call for a pair inverts the orders of
        its dataset, and notes the places of its samples, 8 bytes for each.
        """
        prefix = os.fspath(path_prefix)
        prefixes = [dataset.dataset_path for dataset in self.datasets]
        if prefix not in prefixes:
            raise ValueError(
                f"{prefix} is not in the blend, which has {', '.join(map(str, prefixes))}"
            )
        found = []
        for d, dataset in enumerate(self.datasets):
            if prefixes[d] == prefix:
                places = self._places_of(d)
                samples = dataset.find(prefix, sequence)
                # a dataset may be built for more samples than the blend takes of it
                found += [int(places[k]) for k in samples if k < len(places)]
        return sorted(found)

    def _places_of(self, d):
        """Where the samples 0, 1, 2, ... of dataset d are in the blend: they come in this order."""
        if d not in self._places:
            self._places[d] = np.flatnonzero(self.dataset_index == d)
        return self._places[d]

    def __getstate__(self):
        """Leave the places out of a pickle: find() makes them anew."""
        return self.__dict__ | {"_places": {}}

    def __getitem__(self, idx: int | None) -> dict:
        d, k = self._place(idx)
        return {"dataset_id": np.int16(d), **self.datasets[d][k]}

    def __getitems__(self, indices: typing.Sequence[int | None]) -> list[dict]:
        """Return several samples; each dataset is asked once, for all of its own."""
        if type(self).__getitem__ is not BlendedDataset.__getitem__:
            return [self[idx] for idx in indices]  # a subclass has samples of its own
        batch = [None] * len(indices)
        for d, (rows, wanted) in self._rows_by_dataset(indices).items():
            dataset = self.datasets[d]
            if hasattr(dataset, "__getitems__"):
                samples = dataset.__getitems__(wanted)
            else:
                samples = [dataset[k] for k in wanted]
            for row, sample in zip(rows, samples, strict=True):
                batch[row] = {"dataset_id": np.int16(d), **sample}
        return batch

    def _rows_by_dataset(self, indices):
        """The samples of a batch by dataset: {d: (rows of the batch, samples of dataset d)}."""
        rows_by_dataset = {}
        for row, idx in enumerate(indices):
            d, k = self._place(idx)
            rows, wanted = rows_by_dataset.setdefault(d, ([], []))
            rows.append(row)
            wanted.append(k)
        return rows_by_dataset

    def batch(self, indices: typing.Sequence[int | None]) -> dict:
        """Return several samples as one: {key: tensor (B, ...)}."""
        return torch.utils.data.default_collate(self.__getitems__(indices))


# ==============================================================================
# 7. The builder
# ==============================================================================
# Question answered here: which datasets does a config mean, and who builds them first?
#
#   config: blend + split           each corpus is cut by the split, and each split is a blend
#           blend_per_split         each split is a blend of whole corpora of its own
#           neither                 mock data
#
# size is the number of samples wanted of a split.  One corpus without weights is no blend, and with
# blend_per_split one corpus never is: it is built for size samples, or for one epoch (size None).
# Else, with w the weight of a corpus divided by the sum of all weights:
#
#   weights   size     each corpus is built for                   the blend has
#   given     given    n = ceil(size * w) samples, and a          the sum of all n
#                      surplus, rounded up again
#   given     None     ValueError
#   None      given    one epoch                                  size samples, or all if these are
#                                                                 fewer
#   None      None     one epoch                                  all samples of all corpora
#
# The surplus is for this: at some point of the run a corpus may be ahead of its share.  Where the
# surplus is not enough (there upstream fails), that corpus alone is built again, larger.
#
# With blend_phases, n is the sum of the n of all phases, and the blend of train has all samples of
# all phases: these must be as many as size, or more.
#
#   rank 0: build and write the cache  ->  other ranks: load the cache, or build where they see none


class BlendedMegatronDatasetBuilder:
    """Build train, valid and test from a config.  Upstream: BlendedMegatronDatasetBuilder.

    cls               a MegatronDataset class, such as GPTDataset
    sizes             samples wanted of train, valid and test; None: one epoch (not with weights)
    is_built_on_rank  () -> bool; ranks where it is False get None three times
    config            the config of cls

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus(), toy_corpus()], [1, 3]), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config)
    >>> train, valid, test = builder.build()
    >>> [(sample["dataset_id"].item(), bytes(sample["tokens"].tolist())) for sample in train]
    [(1, b'cccc'), (0, b'bbbc'), (1, b'bbbc'), (1, b'aaaa')]
    """

    def __init__(
        self,
        cls: type[MegatronDataset],
        sizes: typing.Sequence[int | None],
        is_built_on_rank: typing.Callable[[], bool],
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.cls = cls
        self.sizes = list(sizes)
        self.is_built_on_rank = is_built_on_rank
        self.config = config
        self._check_sizes()

    def _check_sizes(self):
        """ValueError for a size that no build can have."""
        config = self.config
        if len(self.sizes) != len(Split):
            raise ValueError(f"sizes: wanted {len(Split)} entries, got {self.sizes}")
        for split, size in zip(Split, self.sizes, strict=True):
            is_number = isinstance(size, numbers.Real) and 0 <= size < math.inf
            if size is not None and not is_number:
                raise ValueError(f"size of {split.name}: wanted a number or None, got {size!r}")
            has_phases = split is Split.train and config.blend_phases is not None
            _, weights = self._blend_of(split)
            if size is None and weights is not None and not has_phases:
                raise ValueError(
                    f"{split.name} is a blend with weights, which needs a size (--sizes), got None"
                )
        if config.multiple_validation_sets and config.full_validation:
            if self.sizes[Split.valid.value] is not None:
                raise ValueError("full_validation: the size of valid must be None")

    def _blend_of(self, split):
        """(prefixes, weights) that a split is built from; (None, None) if it is mock, or not built.

        With blend_per_split one corpus is no blend, whatever its weight, as upstream has it; and
        corpora that are kept apart are none.
        """
        config = self.config
        if config.blend_per_split is None:
            is_built = config.split_matrix[split.value] is not None
            return config.blend if is_built and not config.mock else (None, None)
        blend = config.blend_per_split[split.value]
        if blend is None:
            return None, None
        prefixes, weights = blend
        if len(prefixes) == 1 or self._is_kept_apart(split):
            weights = None
        return prefixes, weights

    def _is_kept_apart(self, split):
        """Is each corpus of this split a dataset of its own?"""
        return split is Split.valid and bool(self.config.multiple_validation_sets)

    def build(self) -> list:
        """Return [train, valid, test]: each None, a dataset, or a list of validation datasets.

        With torch.distributed every rank must call this method.  Rank 0 builds first, so that the
        others find its cache; a failure on any rank is raised on every rank.
        """
        if not _is_distributed():
            return self._build_splits()
        # on_every_rank() runs a function here, waits for the other ranks, and raises an error that
        # one of them met on all of them (section 15)
        is_wanted = on_every_rank(self.is_built_on_rank)
        if _rank() == 0:
            datasets = on_every_rank(self._build_splits)
            on_every_rank(_do_nothing)  # while the others build
        else:
            on_every_rank(_do_nothing)  # while rank 0 builds
            datasets = on_every_rank(self._build_splits if is_wanted else _do_nothing)
        return datasets if is_wanted else [None] * len(Split)

    def _build_splits(self):
        """All splits, on this rank."""
        config = self.config
        if config.mock:
            return self._build_blend([None], None, config.split_matrix)
        if config.blend is not None:
            prefixes, weights = config.blend
            return self._build_blend(prefixes, weights, config.split_matrix)
        return [self._build_split(split) for split in Split]

    def _build_split(self, split):
        """blend_per_split: one split, to which its corpora belong as a whole."""
        prefixes, weights = self._blend_of(split)
        if prefixes is None:
            return None
        matrix = [None] * len(Split)
        matrix[split.value] = (0.0, 1.0)
        if self._is_kept_apart(split) and len(prefixes) > 1:
            datasets = []
            for prefix in prefixes:
                datasets.append(self._build_blend([prefix], None, matrix)[split.value])
            return datasets
        return self._build_blend(prefixes, weights, matrix)[split.value]

    def _build_blend(self, prefixes, weights, matrix):
        """[train, valid, test]: for each split, the blend of its parts of all corpora.

        The matrix has the bounds of each split, or None for a split that is not wanted.  One corpus
        without weights is no blend, but the dataset itself.
        """
        phases = None
        if matrix[Split.train.value] is not None and self.config.blend_phases is not None:
            phases = self._phases_of_train(prefixes)
        if weights is not None:
            if phases is None:  # a phase has a weight for each corpus, so all of them stay
                prefixes, weights = _drop_zero_weights(prefixes, weights, prefixes)
            weights = _normalize_used(weights)
        corpora = self._split_corpora(prefixes, weights, phases, matrix)
        blends = []
        for split in Split:
            parts = [corpus[split.value] for corpus in corpora]
            if matrix[split.value] is None:
                blends.append(None)
            elif split is Split.train and phases is not None:
                blends.append(self._blend_exactly(parts, None, None, phases))
            elif weights is None and len(parts) == 1:
                blends.append(parts[0])
            else:
                blends.append(self._blend_parts(split, parts, weights, self.sizes[split.value]))
        return blends

    def _phases_of_train(self, prefixes):
        """blend_phases, with normalized weights; they must have as many samples as are wanted."""
        phases = _as_phases(self.config.blend_phases, prefixes)
        total = sum(samples for samples, _ in phases)
        size = self.sizes[Split.train.value]
        if size is not None and size > total:
            raise ValueError(
                f"blend_phases has {total} samples, but {size} are wanted of train: "
                f"add a phase of {size - total}, or make the last one longer"
            )
        return phases

    def _split_corpora(self, prefixes, weights, phases, matrix):
        """Each corpus, cut and built for what the blends take of it; in threads."""
        if len(prefixes) == 1:  # a small corpus is open before a thread has started
            sizes = self._sizes_of_corpus(0, weights, phases, 1)
            return [self._split_corpus(prefixes[0], matrix, sizes)]
        pool = concurrent.futures.ThreadPoolExecutor(self.config.num_dataset_builder_threads)
        try:
            futures = []
            for d, prefix in enumerate(prefixes):
                sizes = self._sizes_of_corpus(d, weights, phases, len(prefixes))
                futures.append(pool.submit(self._split_corpus, prefix, matrix, sizes))
            # After an error no further corpus is begun: there may be hundreds, of hours each.
            concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)

    def _sizes_of_corpus(self, d, weights, phases, num_corpora):
        """[samples of train, of valid, of test] that corpus d is built for; None: one epoch."""
        sizes = []
        for split, size in zip(Split, self.sizes, strict=True):
            if split is Split.train and phases is not None:
                targets = [math.ceil(samples * weights[d]) for samples, weights in phases]
                size = self._add_surplus(sum(targets))
            elif weights is not None and size is not None:
                size = self._add_surplus(math.ceil(size * weights[d]))
            elif num_corpora > 1:
                size = None
            sizes.append(size)
        return sizes

    def _add_surplus(self, target):
        """How many samples a corpus is built for, so that a blend can take this many of it."""
        return math.ceil(target * (1 + self.config.mid_level_dataset_surplus))

    def _split_corpus(self, prefix, matrix, sizes):
        """Open one corpus, once, and cut it: [its part of train, of valid, of test]."""
        opened = self.cls.build_low_level_dataset(prefix, self.config)
        n = self.cls.numel_low_level_dataset(opened)
        if n >= 2**31:
            raise ValueError(
                f"{hide_credentials(prefix)}: {n} sequences, but int32 numbers only {2**31 - 1}: "
                "split the corpus"
            )
        parts = []
        for split in Split:
            bounds = matrix[split.value]
            if bounds is None:
                parts.append(None)
                continue
            first, end = split_range(bounds, n)
            indices = range(first, end)
            if self.cls.__init__ is not GPTDataset.__init__:
                indices = np.arange(first, end, dtype=np.int32)  # what upstream gives to a class
            size = sizes[split.value]
            parts.append(self.cls(opened, prefix, indices, size, split, self.config))
        return parts

    def _blend_parts(self, split, parts, weights, size):
        """The blend of one split, whose corpora have weights or are taken once each."""
        if weights is not None:
            size = sum(math.ceil(size * weight) for weight in weights)
        else:
            weights = [len(part) for part in parts]
            if not any(weights):
                if size == 0:
                    return None  # nothing is wanted, and nothing is there
                wanted = "one epoch" if size is None else f"{size} samples"
                raise ValueError(f"{split.name}: wanted {wanted}, but no corpus has a sample in it")
            if size is not None and size > sum(weights):
                warnings.warn(
                    f"{split.name}: an epoch has {sum(weights):,} samples, not {size:,}: the run "
                    "will end early; give weights, to repeat corpora",
                    stacklevel=2,
                )
                size = sum(weights)
            parts = self._leave_out_empty(split, parts)
            weights = [len(part) for part in parts]
        return self._blend_exactly(parts, weights, size)

    def _leave_out_empty(self, split, parts):
        """The parts that have a sample; a warning names the others."""
        kept = []
        for part in parts:
            if len(part) > 0:
                kept.append(part)
            else:
                warnings.warn(
                    f"{split.name} of {_name(part)} holds no whole sample: left out of the blend",
                    stacklevel=2,
                )
        return kept

    def _blend_exactly(self, parts, weights, size, phases=None):
        """The blend of these parts; one that would not last is built again, larger."""
        try:
            return BlendedDataset(parts, weights, size, self.config, phases)
        except BlendTooLarge as error:
            needed = error.needed
        # Only these corpora are built again: a corpus that is built for another number of samples
        # can come in another order, and the others must keep upstream's order.
        for d, part in enumerate(parts):
            if part in needed:
                opened = part.dataset, part.dataset_path, part.indices
                parts[d] = self.cls(*opened, needed[part], part.index_split, self.config)
        return BlendedDataset(parts, weights, size, self.config, phases)


def _do_nothing():
    """The part of a rank that only waits for the others."""


# ==============================================================================
# 8. Samplers and resume
# ==============================================================================
# Question answered here: which samples does rank r get at step t, and after a stop?
#
# A sampler runs on each data-parallel rank and yields the samples of that rank's micro-batches.
# The micro-batches that all ranks read at the same time are called a round here.  A training step,
# which changes the weights once, takes one round or several (see NumMicroBatches).
#
# In this section an epoch is once through all samples of the dataset (which may hold several epochs
# of its sequences, see section 4).  One iteration over a sampler is called a pass.  A pass starts
# at consumed_samples and ends at the end of the epoch, so the first pass after a stop may be only
# the rest of an epoch.
#
# The sampler "single", with micro_batch_size 2 and data_parallel_size 2:
#
#   round          0              1              2
#   samples        0  1  2  3     4  5  6  7     8 ...
#   rank           0  0  1  1     0  0  1  1     0
#
# One number, consumed_samples, says how many samples all ranks together have used.  A checkpoint
# keeps it, with a description of the data and of the order (save_position below).  A job that goes
# on may have other ranks, micro-batches or workers, wherever the order does not depend on them:
#
#   sampler             order                              what may change on resume
#   single,             0, 1, 2, ...                       ranks, micro-batch size, workers
#   full_validation
#   cyclic, unsharded   in each epoch all ranks draw the   workers; ranks and micro-batch size, if
#                       same shuffled order, and take      (a), (b) and (c) hold
#                       its samples in turn
#   cyclic, sharded     in each epoch each rank shuffles   workers; micro-batch size, if (a) and (b)
#                       a part of its own                  hold
#
#   (a) consumed_samples is a whole number of the new rounds
#   (b) as many samples are shuffled: those that fill no micro-batch (sharded: no round) are not
#   (c) consumed_samples is as far in the same epoch: new rounds may change how long an epoch is
#
# A job that goes on may also train longer, or mix its corpora in another way from here on, if its
# datasets have stable_order (section 4) and the order of its sampler does not depend on how many
# samples there are, as that of "single" does not.  Then the state describes the past alone.  With
# u, v and w for the weights of phases:
#
#   the state, after 600 samples       [past: 500 samples with weights u, 100 with weights v]
#   a job that it fits                 phases (500, u) (400, v)
#   others that it fits                phases (500, u) (900, v) (800, w);  (500, u) (100, v) (99, w)
#   refused: another past              phases (600, u) (400, v);  (500, u) (400, w)


class _Sampler:
    """What the samplers share: their sizes, and the check of where a pass can start.

    kind                  the sampler's name in a saved state
    is_in_order           are the samples that were consumed the first ones of the dataset?
    consumed_samples      where the next pass starts
    samples_per_round     micro_batch_size * data_parallel_size
    active_total_samples  the samples of whole rounds

    A sampler also has check_start(consumed_samples), a ValueError unless a pass can start there,
    and order_key(consumed_samples), a dict that is equal for two samplers if consumed_samples is
    the same place of the same order for them, so that one can go on where the other one stopped.
    """

    kind: str
    is_in_order = True

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        sizes = {
            "total_samples": total_samples,
            "micro_batch_size": micro_batch_size,
            "data_parallel_size": data_parallel_size,
        }
        for name, size in sizes.items():
            if size < 1 or size % 1:
                raise ValueError(f"{name} must be >= 1 and whole, got {size}")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank must be 0 to {data_parallel_size - 1}, "
                f"got {data_parallel_rank}"
            )
        self.total_samples = int(total_samples)
        self.consumed_samples = int(consumed_samples)
        self.micro_batch_size = int(micro_batch_size)
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = int(data_parallel_size)
        self.drop_last = drop_last
        self.samples_per_round = self.micro_batch_size * self.data_parallel_size
        self.active_total_samples = self.total_samples - self.total_samples % self.samples_per_round
        self.check_start(self.consumed_samples)

    @property
    def micro_batch_times_data_parallel_size(self) -> int:
        """Upstream's name of samples_per_round."""
        return self.samples_per_round

    def get_start_end_idx(self) -> tuple[int, int]:
        """Return which samples of a whole round are this rank's: (first, end).  Upstream's name.

        >>> MegatronPretrainingSampler(8, 0, 2, 1, 2).get_start_end_idx()
        (2, 4)
        """
        first = self.data_parallel_rank * self.micro_batch_size
        return first, first + self.micro_batch_size


class MegatronPretrainingSampler(_Sampler):
    """Samples in order, from consumed_samples on.  Upstream: MegatronPretrainingSampler.

    Yields lists of micro_batch_size indices; rank r gets the r-th part of each round.
    drop_last=False: the samples of the last, short round are shared out, and None (padding) stands
    in the missing places, so that every rank yields the same number of batches.  A second pass
    starts at 0.  len() counts the batches of the next pass (upstream: samples).

    >>> list(MegatronPretrainingSampler(6, 0, 1, data_parallel_rank=1, data_parallel_size=2))
    [[1], [3], [5]]
    """

    kind = "single"

    def __len__(self) -> int:
        whole, rest = divmod(self.total_samples - self.consumed_samples, self.samples_per_round)
        if rest and not self.drop_last:
            return whole + 1
        return whole

    def __iter__(self) -> typing.Iterator[list[int | None]]:
        num_batches = len(self)
        first = self.consumed_samples
        self.consumed_samples = 0  # where the pass after this one starts
        rank = self.data_parallel_rank
        ranks = self.data_parallel_size
        for _ in range(num_batches):
            count = min(self.samples_per_round, self.total_samples - first)
            # a short round is cut as evenly as can be: two ranks differ by one sample at most
            begin = first + _ceil_div(rank * count, ranks)
            end = first + _ceil_div((rank + 1) * count, ranks)
            padding = [None] * (self.micro_batch_size - (end - begin))
            yield [*range(begin, end), *padding]
            first += self.samples_per_round

    def check_start(self, consumed_samples: int) -> None:
        """ValueError unless a pass can start there; at the very end an empty pass can."""
        if not 0 <= consumed_samples <= self.total_samples:
            raise ValueError(
                f"consumed_samples must be 0 to total_samples ({self.total_samples}), "
                f"got {consumed_samples}"
            )

    def order_key(self, consumed_samples: int) -> dict:
        """Return what must be equal for a run to go on in the same order."""
        return {"consumed": consumed_samples}


class MegatronFullValidationSampler(MegatronPretrainingSampler):
    """One sample for each rank in each round, to the last sample, then None.

    micro_batch_size is accepted, and not used.

    >>> list(MegatronFullValidationSampler(3, data_parallel_rank=1, data_parallel_size=2))
    [[1], [None]]
    """

    kind = "full_validation"

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int = 0,
        micro_batch_size: int = 1,
        data_parallel_rank: int = 0,
        data_parallel_size: int = 1,
    ) -> None:
        super().__init__(
            total_samples, consumed_samples, 1, data_parallel_rank, data_parallel_size, False
        )


class MegatronPretrainingRandomSampler(_Sampler):
    """Samples in a new random order every epoch.  Upstream: MegatronPretrainingRandomSampler.

    data_sharding  True: each rank shuffles a part of its own; False: one order, dealt to the ranks
    seed           the order of epoch e is drawn with seed + e (upstream: with e)

    The samples that fill no whole round at the end of an order are left out, so that all ranks stay
    in the same epoch (upstream, unsharded, keeps some of them, and ranks get into different
    epochs).  A pass goes on at consumed_samples, which every batch advances; len() counts the
    batches left in the epoch.

    >>> list(MegatronPretrainingRandomSampler(None, 8, 0, 1, 0, 1, data_sharding=True))
    [[4], [0], [7], [3], [2], [5], [1], [6]]
    """

    kind = "cyclic"
    is_in_order = False

    def __init__(
        self,
        dataset: typing.Any,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
        seed: int = 0,
    ) -> None:
        self.dataset = dataset
        self.data_sharding = data_sharding
        self.seed = int(seed)
        super().__init__(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )

    def __len__(self) -> int:
        done = self.consumed_samples % self.active_total_samples
        return (self.active_total_samples - done) // self.samples_per_round

    def __iter__(self) -> typing.Iterator[list[int]]:
        epoch, done = divmod(self.consumed_samples, self.active_total_samples)
        generator = torch.Generator().manual_seed(self.seed + epoch)
        if self.data_sharding:
            order = self._sharded_order(done, generator)
        else:
            order = self._unsharded_order(done, generator)
        for batch in order.split(self.micro_batch_size):
            self.consumed_samples += self.samples_per_round
            yield batch.tolist()

    def _sharded_order(self, done, generator):
        """Rank r shuffles the samples [r * part, (r + 1) * part) for itself."""
        ranks = self.data_parallel_size
        part = self._num_shuffled() // ranks
        order = torch.randperm(part, generator=generator)
        return self.data_parallel_rank * part + order[done // ranks :]

    def _unsharded_order(self, done, generator):
        """All ranks draw one order and take its samples in turn."""
        order = torch.randperm(self._num_shuffled(), generator=generator)
        order = order[done : self.active_total_samples]
        return order[self.data_parallel_rank :: self.data_parallel_size]

    def _num_shuffled(self):
        """How many samples are shuffled, as upstream has it.

        Sharded: whole rounds, so that all parts are equal.  Unsharded: whole micro-batches.
        """
        unit = self.samples_per_round if self.data_sharding else self.micro_batch_size
        return self.total_samples - self.total_samples % unit

    def check_start(self, consumed_samples: int) -> None:
        """ValueError unless a pass can start there: after a whole number of rounds."""
        if not self.active_total_samples:
            raise ValueError(
                f"total_samples ({self.total_samples}) must fill a round of "
                f"{self.samples_per_round} samples"
            )
        if not 0 <= consumed_samples < 2**63 or consumed_samples % self.samples_per_round:
            raise ValueError(
                f"consumed_samples must be a multiple of the round of {self.samples_per_round} "
                f"samples, got {consumed_samples}"
            )

    def order_key(self, consumed_samples: int) -> dict:
        """Return what must be equal for a run to go on in the same order."""
        epoch, done = divmod(consumed_samples, self.active_total_samples)
        key = {
            "seed": self.seed,
            "data_sharding": self.data_sharding,
            "epoch": epoch,
            "done": done,
            "shuffled": self._num_shuffled(),
        }
        if self.data_sharding:
            key["data_parallel_size"] = self.data_parallel_size
        return key


def fingerprint(dataset: typing.Any) -> dict:
    """Return what a resumed run must find again: the data, however its path is called.

    The dict is JSON-able.  A dataset that is not one of ours is known by its class and length.
    Cost: a digest of the ends of each .idx, and no token is read.

    >>> fingerprint(range(3))
    {'class': 'range', 'num_samples': 3}
    """
    found = {"class": type(dataset).__name__, "num_samples": len(dataset)}
    if isinstance(dataset, BlendedDataset):
        first = fingerprint(dataset.datasets[0])
        for key in ("split", "sequence_length", "random_seed", "stable_order"):
            if key in first:
                found[key] = first[key]  # all datasets of a blend share it
        found["size"] = dataset.size
        if dataset.weights is None:  # phases have weights
            found["phases"] = _describe_phases(dataset.phases)
        else:
            found["weights"] = _number_weights(dataset.weights)
        found["corpora"] = {}
        for d, part in enumerate(dataset.datasets):
            found["corpora"][str(d)] = _fingerprint_of_corpus(part)
    elif isinstance(dataset, MegatronDataset):
        found["split"] = dataset.index_split.name
        found["requested"] = dataset.num_samples
        found["sequence_length"] = dataset.config.sequence_length
        found["random_seed"] = dataset.config.random_seed
        found["corpora"] = {"0": _fingerprint_of_corpus(dataset)}
        if isinstance(dataset, GPTDataset) and dataset.config.stable_order:
            found["stable_order"] = True
    return found


def _fingerprint_of_corpus(dataset):
    """What tells a dataset of a blend from others; the name is for messages, and may change."""
    found = {"name": os.path.basename(_name(dataset)), "num_samples": len(dataset)}
    if isinstance(dataset, MegatronDataset):
        found["requested"] = dataset.num_samples
        found |= _describe_contents(dataset)
    return found


def _describe_contents(dataset):
    """Which documents of which data, and how they are cut; a digest stands for the data."""
    made_from = dataset.made_from()
    if not made_from:
        return {}
    first, end, digest = made_from["documents"]
    found = {"documents": [first, end], "num_sequences": len(dataset.dataset)}
    identity = {}  # what tells the file from others
    for key, value in made_from.items():
        if key in ("keep_partial", "extra_token"):
            found[key] = value
        elif key not in ("documents", "idx_mtime_ns"):  # a copy of a corpus is the same corpus
            identity[key] = value
    found["contents"] = _md5(json.dumps([digest, identity]))
    return found


def _number_weights(weights):
    """[weight, ...] -> {"number of the corpus": weight}, without those that are 0."""
    return {str(d): weight for d, weight in enumerate(weights) if weight}


def _describe_phases(phases):
    """[(samples, weights), ...] -> [[samples, numbered weights], ...], for a state."""
    return [[samples, _number_weights(weights)] for samples, weights in phases]


def fingerprint_of_past(dataset: typing.Any, consumed_samples: int) -> dict:
    """Return what must be the same for the first consumed_samples samples to be the same.

    Where a dataset begins with every shorter one (is_stable), this is less than fingerprint():
    neither how many samples there are nor the phases and the corpora that come later belong to it.
    """
    found = fingerprint(dataset)
    if not getattr(dataset, "is_stable", False):
        return found
    for key in ("num_samples", "requested", "size", "weights"):
        found.pop(key, None)
    if isinstance(dataset, BlendedDataset):
        phases = _phases_of_past(dataset.phases, consumed_samples)
        found["phases"] = _describe_phases(phases)
        for d in range(len(dataset.datasets)):
            if not any(weights[d] for _, weights in phases):
                del found["corpora"][str(d)]
    for corpus in found["corpora"].values():
        del corpus["num_samples"]
        del corpus["requested"]
    return found


def _phases_of_past(phases, consumed_samples):
    """The phases that the first samples are from, the last of them cut off behind these samples."""
    past = []
    left = consumed_samples
    for samples, weights in phases:
        if left > 0:
            past.append((min(samples, left), weights))
        left -= samples
    return past


def save_position(dataset: typing.Any, sampler: _Sampler, consumed_samples: int) -> dict:
    """Return a small JSON-able dict: how far, in which order, of which data.

    >>> sampler = MegatronPretrainingSampler(8, 0, 2, 0, 1)
    >>> state = save_position(range(8), sampler, 4)
    >>> check_position(state, range(8), sampler)
    4
    """
    past = consumed_samples if sampler.is_in_order else len(dataset)
    return {
        "version": 3,
        "consumed_samples": consumed_samples,
        "sampler": sampler.kind,
        "order": sampler.order_key(consumed_samples),
        "dataset": fingerprint_of_past(dataset, past),
    }


def check_position(state: dict, dataset: typing.Any, sampler: _Sampler, strict: bool = True) -> int:
    """Return the consumed samples of a saved position; ValueError names what does not fit here.

    state is what save_position() returned, at a place where a pass of the sampler can start.
    With stable_order the dataset may have more samples, fewer, or other phases, if the samples that
    were consumed are the same.
    strict=False lets a run go on with other data or in another order.
    """
    try:
        consumed_samples = operator.index(state["consumed_samples"])
        saved = _flatten_position(state)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"this is no state of a PretrainingDataLoader: {error!r}") from None
    sampler.check_start(consumed_samples)
    here = _flatten_position(save_position(dataset, sampler, consumed_samples))
    differences = _describe_differences(here, saved)
    if differences and strict:
        raise ValueError(
            f"the state does not fit: {'; '.join(differences)}.  Go on with the data and the "
            "settings of the state, or take what is here from sample "
            f"{consumed_samples:,} on: load_state_dict(state, strict=False)"
        )
    return consumed_samples


def _flatten_position(state):
    """All of a position in one dict: {(entry, the number of its corpus, or ""): value}.

    {"order": {"consumed": 4}, "dataset": {"corpora": {"0": {"name": "p"}}, ...}, ...} becomes
    {("consumed", ""): 4, ("corpora", ""): ["0"], ("name", "0"): "p", ...}
    """
    data = dict(state["dataset"])
    corpora = data.pop("corpora", {})
    weights = data.pop("weights", {})
    phases = data.pop("phases", [])
    data["version"] = state["version"]
    data["sampler"] = state["sampler"]
    data["corpora"] = sorted(corpora)
    flat = {}
    for part in (state["order"], data):
        for entry, value in part.items():
            flat[entry, ""] = value
    for d, weight in weights.items():
        flat["weight", d] = weight
    for number, (samples, weights_of_phase) in enumerate(phases):
        flat[f"samples of phase {number}", ""] = samples
        for d, weight in weights_of_phase.items():
            flat[f"weight in phase {number}", d] = weight
    for d, corpus in corpora.items():
        for entry, value in corpus.items():
            flat[entry, d] = value
    # the keys of a state that somebody else wrote may be no texts, which cannot be sorted
    return {(str(entry), str(d)): value for (entry, d), value in flat.items()}


# What the entries of a position are called in a message, where their own name does not say it.
_WORDS_OF_POSITION = {
    "documents": "the range of documents",
    "done": "the number of samples done in the epoch",
    "requested": "the number of samples asked for",
    "shuffled": "the number of samples shuffled in an epoch",
}


def _describe_differences(here, saved):
    """One sentence for each entry in which two flat positions differ; names may differ."""
    keys = sorted(here.keys() | saved.keys())
    if here["sampler", ""] != saved["sampler", ""]:
        keys = [("sampler", "")]  # another sampler has other entries
    sentences = []
    for entry, d in keys:
        found = here.get((entry, d))
        wanted = saved.get((entry, d))
        if found == wanted or entry == "name":
            continue
        if (d in here["corpora", ""]) != (d in saved["corpora", ""]):
            continue  # a corpus that is not there at all: "corpora" differ, which is said
        words = _WORDS_OF_POSITION.get(entry, entry)
        if d:
            words += f" of corpus {d} ({here.get(('name', d))})"
        if entry == "contents":  # a digest, which says nothing to a person
            sentences.append(f"the {words} are not those in the state ({saved.get(('name', d))})")
        else:
            shown = _with_thousands(found)
            sentences.append(f"{words} is {shown} here, {_with_thousands(wanted)} in the state")
    return sentences


def _with_thousands(value):
    """A value as a person reads it: 1,000 and not 1000."""
    if type(value) is int:
        return f"{value:,}"
    return repr(value)


def cyclic_iter(iterable: typing.Iterable) -> typing.Iterator:
    """Yield the items of an iterable again and again, pass after pass.  Upstream: cyclic_iter.

    One pass may be empty, as in a run that is resumed at the end of an epoch.  Two empty passes in
    a row are a ValueError instead of a loop without end.

    >>> list(itertools.islice(cyclic_iter([1, 2, 3]), 7))
    [1, 2, 3, 1, 2, 3, 1]
    """
    empty_passes = 0
    while empty_passes < 2:
        empty_passes += 1
        for item in iterable:
            empty_passes = 0
            yield item
    raise ValueError("nothing to iterate over: the loader yielded no batch in two passes")


class RerunDataIterator(collections.abc.Iterator):
    """An iterator whose last micro-batches can be had again, to run a step a second time.

    Upstream: RerunDataIterator.

    rewind() goes back to the last advance(); advance() forgets what was read until now.  Call
    advance() before each step, the first one too: before the first call nothing is kept, so that a
    loop which never calls it does not fill the memory with batches.

    >>> numbers = RerunDataIterator(range(9))
    >>> numbers.advance()
    >>> next(numbers), next(numbers), numbers.rewind(), next(numbers), next(numbers)
    (0, 1, None, 0, 1)
    """

    def __init__(self, iterable: typing.Iterable) -> None:
        self.iterable = iterable
        self._source = iter(iterable)
        self._is_kept = False
        # the names of these three are upstream's
        self.saved_microbatches = []  # since the last advance()
        self.replaying = False  # are some of them to be had again before the source goes on?
        self.replay_pos = 0  # the next of them

    def __next__(self) -> typing.Any:
        if self.replaying and self.replay_pos < len(self.saved_microbatches):
            item = self.saved_microbatches[self.replay_pos]
            self.replay_pos += 1
            return item
        self.replaying = False
        item = next(self._source)
        if self._is_kept:
            self.saved_microbatches.append(item)
        return item

    def rewind(self) -> None:
        """Yield again all that came since the last advance(); ValueError before the first one."""
        if not self._is_kept:
            raise ValueError("nothing to go back to: call advance() before the first step")
        self.replaying = True
        self.replay_pos = 0

    def advance(self) -> None:
        """The step is done: what was read is not needed any more."""
        left = []
        if self.replaying:
            left = self.saved_microbatches[self.replay_pos :]
        self.saved_microbatches = left
        self.replay_pos = 0
        self._is_kept = True

    def state_dict(self) -> dict:
        """Return what was read since the last advance(), and how much of it is read again."""
        return {
            "saved_microbatches": list(self.saved_microbatches),
            "replaying": self.replaying,
            "replay_pos": self.replay_pos,
        }

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was taken; the iterable must go on there by itself.

        What is read from now on is kept, as after advance().
        """
        self.saved_microbatches = list(state["saved_microbatches"])
        self.replaying = state["replaying"]
        self.replay_pos = state["replay_pos"]
        self._is_kept = True


def get_train_valid_test_num_samples(
    *,
    global_batch_size: int,
    eval_interval: int,
    eval_iters: int,
    train_iters: int | None = None,
    train_samples: int | None = None,
    full_validation: bool = False,
    skip_train: bool = False,
) -> tuple[int, int | None, int]:
    """Return how many samples a run needs of train, valid (None with full_validation) and test.

    The run has train_iters steps, or train_samples samples.  It evaluates eval_iters global batches
    of valid every eval_interval steps and at the end, and of test once.  With skip_train it does
    not train, and evaluates valid once.  Upstream: get_train_valid_test_num_samples.

    >>> get_train_valid_test_num_samples(global_batch_size=8, train_iters=100, eval_interval=50,
    ...                                  eval_iters=2)
    (800, 48, 16)
    """
    if (train_iters is None) == (train_samples is None):
        raise ValueError(f"give train_iters or train_samples, got {train_iters}, {train_samples}")
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size must be >= 1, got {global_batch_size}")
    if eval_interval < 1:
        raise ValueError(f"eval_interval must be >= 1, got {eval_interval}")
    if train_samples is None:
        train_samples = train_iters * global_batch_size
    if train_samples < 0 or eval_iters < 0:
        raise ValueError(
            "wanted training samples or steps, and eval_iters, >= 0, "
            f"got {train_samples} samples and eval_iters {eval_iters}"
        )
    evaluations = 1
    if not skip_train:
        evaluations += train_samples // global_batch_size // eval_interval
    test_samples = eval_iters * global_batch_size
    valid_samples = None if full_validation else evaluations * test_samples
    return train_samples, valid_samples, test_samples


class NumMicroBatches:
    """Micro-batches in a step, constant or growing.  Upstream: num_microbatches_calculator.

    global_batch_size    samples in a step, of all data-parallel ranks together
    micro_batch_size     samples that one rank handles at once
    data_parallel_size   data-parallel ranks
    rampup_batch_size    (start, increment, samples): the global batch grows from start to
                         global_batch_size in equal steps of increment over so many samples

    ValueError if one of the global batch sizes on the way is no whole number of micro-batches on
    every rank.

    >>> ramp = NumMicroBatches(32, 4, 2, rampup_batch_size=(16, 8, 100))
    >>> for consumed in (0, 50, 101):
    ...     ramp.update(consumed)
    ...     print(ramp.get(), ramp.get_current_global_batch_size())
    2 16
    3 24
    4 32
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        rampup_batch_size: typing.Sequence[int] | None = None,
    ) -> None:
        ramp = rampup_batch_size
        if not ramp:
            ramp = (global_batch_size, 1, 0)  # one size from the start
        if len(ramp) != 3:
            raise ValueError(f"rampup_batch_size is (start, increment, samples), got {ramp}")
        start, increment, samples = ramp
        if start < 1 or increment < 1 or samples < 0:
            raise ValueError(f"ramp-up {ramp}: wanted start and increment >= 1, samples >= 0")
        self.global_batch_size = global_batch_size
        self.unit = micro_batch_size * data_parallel_size
        self.samples = samples
        self.sizes = range(start, global_batch_size + 1, increment)
        if global_batch_size not in self.sizes:
            raise ValueError(f"ramp-up {ramp}: wanted equal steps up to {global_batch_size}")
        if self.unit < 1:
            raise ValueError(f"micro_batch_size * data_parallel_size must be >= 1, got {self.unit}")
        for size in self.sizes:
            if size % self.unit:
                raise ValueError(
                    f"a global batch of {size} samples is no multiple of micro_batch_size * "
                    f"data_parallel_size, {self.unit}"
                )
        self.update(0)

    def update(self, consumed_samples: int) -> None:
        """Set the batch size of the step that begins after so many samples."""
        increments = len(self.sizes) - 1
        if increments and self.samples and consumed_samples <= self.samples:
            samples_per_increment = self.samples / increments
            self._current = self.sizes[int(consumed_samples / samples_per_increment)]
        else:
            self._current = self.sizes[-1]

    def get(self) -> int:
        """Return the number of micro-batches of the current step."""
        return self._current // self.unit

    def get_current_global_batch_size(self) -> int:
        """Return the number of samples of the current step."""
        return self._current


# ==============================================================================
# 9. Parallel batches
# ==============================================================================
# Question answered here: which part of a batch does each rank get, and how?
#
# A big model is trained by many ranks, which share the work along up to four axes:
#
#   tp  tensor parallel     each rank holds a part of every layer; all of them need the same batch
#   cp  context parallel    each rank has a part of every row of the batch
#   dp  data parallel       each rank has the whole model, and a batch of its own
#   pp  pipeline parallel   each rank (stage) holds some of the layers: the first stage needs the
#                           tokens, the last stage the labels
#
# With 2 ranks along each axis, a rank's number is tp + 2 cp + 4 dp + 8 pp:
#
#   global batch         --sampler-->    dp 0: ranks 0-3, 8-11          dp 1: ranks 4-7, 12-15
#   batch of a dp rank   --stage---->    pp 0: tokens, positions        pp 1: labels, loss mask
#   batch of a stage     --one buffer->  tp 0: reads and sends it       tp 1: receives it
#   batch of a tp rank   --cut------>    cp 0: chunks 0 and 3 of 4      cp 1: chunks 1 and 2
#
# Why chunks 0 and 3?  Under a causal mask the last token attends to all others, the first only to
# itself.  So the last chunk costs most and the first least, and each pair of chunks costs the same.
#
# The buffer of a first stage, 2 rows of 4 tokens.  The widest items come first, so that each tensor
# begins at a multiple of its item size, and a receiver can use it where it lies:
#
#   byte   0        8                         72                        136
#          | status | tokens, 2 x 4 int64     | position_ids, 2 x 4     |
#
# The receivers know the layout beforehand, from their stage and the shape of a batch.  Two things
# they cannot know, so the status says them, and a second broadcast follows:
#   packed   the batch has cu_seqlens and max_seqlen (several documents in a row, kept apart)
#   failed   the reader met an error: its sentence follows, and every rank of the group raises it

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_PACKING_KEYS = ("cu_seqlens", "max_seqlen")

_PLAIN = 0
_PACKED = 1
_FAILED = 2


class ParallelGroups:
    """The layout of a job: which ranks work together, and in which groups.

    tensor, context, pipeline   ranks along these axes; the data axis is what is left of the world
    Raises                      ValueError where the world cannot be cut so
    Cost                        every rank makes the process groups of all ranks, once

    A kind of group is an axis (tp, cp, dp or pp) or several axes joined by "-".  The ranks of a
    group differ in their places along these axes and in nothing else.  Every rank must make its
    ParallelGroups at the same point.  Without torch.distributed the layout is one process.

    Upstream: parallel_state and its RankGenerator, with the order tp-cp-ep-dp-pp (ep, for experts,
    is 1 here).

    >>> ParallelGroups.rank_lists("cp", tensor=2, context=2)
    [[0, 2], [1, 3]]
    >>> ParallelGroups().size("dp-cp")
    1
    """

    # The kinds with a process group.  ranks(), rank(), size() and rank_lists() take any other too.
    _KINDS = ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp", "tp-cp-pp")

    @staticmethod
    def rank_lists(
        kind: str, *, tensor: int = 1, context: int = 1, data: int = 1, pipeline: int = 1
    ) -> list[list[int]]:
        """All groups of a kind in a job of tensor * context * data * pipeline ranks.

        Returns  the ranks of each group; each rank is in exactly one group
        Raises   ValueError for an unknown axis, or a size below 1
        Cost     about a microsecond a rank
        """
        axes = kind.split("-")
        if not set(axes) <= {"tp", "cp", "dp", "pp"}:
            raise ValueError(f"kind {kind!r}: wanted tp, cp, dp or pp, or several joined by '-'")
        if min(tensor, context, data, pipeline) < 1:
            raise ValueError(
                "sizes must be at least 1, got "
                f"tensor={tensor}, context={context}, data={data}, pipeline={pipeline}"
            )
        groups = {}
        for rank in range(tensor * context * data * pipeline):
            rest, tp = divmod(rank, tensor)
            rest, cp = divmod(rest, context)
            pp, dp = divmod(rest, data)
            place = {"tp": tp, "cp": cp, "dp": dp, "pp": pp}
            others = tuple(at for axis, at in place.items() if axis not in axes)
            groups.setdefault(others, []).append(rank)
        return list(groups.values())

    def __init__(self, *, tensor: int = 1, context: int = 1, pipeline: int = 1) -> None:
        world = 1
        if _is_distributed():
            world = torch.distributed.get_world_size()
        model = tensor * context * pipeline
        if min(tensor, context, pipeline) < 1 or world % model != 0:
            raise ValueError(
                f"{world} ranks cannot be cut into tensor {tensor} x context {context} x "
                f"pipeline {pipeline}: the product must be a divisor of the number of ranks"
            )
        self.sizes = {
            "tensor": tensor,
            "context": context,
            "data": world // model,
            "pipeline": pipeline,
        }
        self._ranks = {}  # {kind: the ranks of this rank's group}
        self._groups = {}  # {kind: the process group of this rank}
        for kind in self._KINDS:
            lists = self.rank_lists(kind, **self.sizes)
            self._ranks[kind] = self._own_list(lists)
            self._groups[kind] = self._new_group(lists)
        # The tensor-parallel group over which batches travel is always gloo, from CPU to CPU.  Over
        # NCCL a receiver would have to read the status of a batch from its GPU, and so wait for all
        # the work that is queued there.
        self.batch_group = self._groups["tp"]
        if _is_distributed() and torch.distributed.get_backend() != "gloo":
            lists = self.rank_lists("tp", **self.sizes)
            self.batch_group = self._new_group(lists, backend="gloo")

    @staticmethod
    def _own_list(lists):
        """The list that has this rank."""
        for ranks in lists:
            if _rank() in ranks:
                return ranks
        raise AssertionError("every rank is in one group of each kind")

    @staticmethod
    def _new_group(lists, backend=None):
        """Make a process group of each list, all of them on every rank; return this rank's."""
        if not _is_distributed():
            return None
        mine, _ = torch.distributed.new_subgroups_by_enumeration(lists, backend=backend)
        return mine

    def ranks(self, kind: str) -> list[int]:
        """The ranks of this rank's group of a kind."""
        if kind not in self._ranks:
            self._ranks[kind] = self._own_list(self.rank_lists(kind, **self.sizes))
        return self._ranks[kind]

    def rank(self, kind: str) -> int:
        """This rank's place in its group of a kind, from 0."""
        return self.ranks(kind).index(_rank())

    def size(self, kind: str) -> int:
        """The number of ranks in a group of a kind."""
        return len(self.ranks(kind))

    def group(self, kind: str) -> "torch.distributed.ProcessGroup | None":
        """This rank's process group of a kind; None without torch.distributed."""
        for known, group in self._groups.items():
            if set(known.split("-")) == set(kind.split("-")):
                return group
        raise ValueError(f"no process group {kind!r}: there are {', '.join(self._groups)}")

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is in the first pipeline stage, which has the embedding."""
        return self.rank("pp") == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is in the last pipeline stage, which computes the loss."""
        return self.rank("pp") == self.size("pp") - 1


def get_batch(
    data_iterator: typing.Iterator[dict] | None,
    groups: ParallelGroups,
    *,
    use_per_sequence_balancing: bool = False,
    **options: typing.Any,
) -> dict[str, typing.Any]:
    """The next micro-batch of this rank: get_batch_on_this_tp_rank(), then the cut for its cp rank.

    Upstream: get_batch, in pretrain_gpt.py.

    options  those of get_batch_on_this_tp_rank(); use_per_sequence_balancing is that of
             get_batch_on_this_cp_rank().  A batch that cannot be cut is an error on every tp rank,
             because they all cut the same batch.

    >>> text = torch.tensor([list(b"aaaab")])
    >>> batch = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(1, 4)}
    >>> batch["position_ids"] = torch.arange(4)[None]
    >>> mine = get_batch(iter([batch]), ParallelGroups(), micro_batch_size=1, sequence_length=4)
    >>> bytes(mine["labels"][0].tolist()), mine["attention_mask"]
    (b'aaab', None)
    """
    batch = get_batch_on_this_tp_rank(data_iterator, groups, **options)
    return get_batch_on_this_cp_rank(
        batch,
        groups.rank("cp"),
        groups.size("cp"),
        use_per_sequence_balancing=use_per_sequence_balancing,
    )


def get_batch_on_this_tp_rank(
    data_iterator: typing.Iterator[dict] | None,
    groups: ParallelGroups,
    *,
    micro_batch_size: int,
    sequence_length: int,
    create_attention_mask: bool = False,
    mtp: bool = False,
    device: torch.device | str | None = None,
) -> dict[str, torch.Tensor | None]:
    """The next micro-batch on every tensor-parallel rank; only tp rank 0 reads it.

    data_iterator          iterator over a loader's batches; only tp rank 0 of the first and of the
                           last pipeline stage uses it, and it may be None on all other ranks
    micro_batch_size       B, rows of a batch
    sequence_length        S, tokens of a row
    create_attention_mask  return the dense mask too; where the batch has none, a causal one is
                           made, in which the documents of cu_seqlens do not see one another
    mtp                    the last stage predicts several tokens ahead (multi-token prediction),
                           and needs tokens and position_ids too
    device                 where the tensors are put; None: the GPU of this rank in an NCCL job,
                           else the CPU
    Returns                a dict of five keys: tokens, labels, position_ids, int64 (B, S);
                           loss_mask, float32 (B, S); attention_mask, bool (B, 1, S, S), True =
                           may not attend; None for what this pipeline stage does not need.
                           cu_seqlens, int32 (B, S+1), and max_seqlen, int32 (B,), if the batch
                           has them.
    Raises                 what the reader met, on every rank of its tp group: StopIteration at the
                           end of the data, ValueError where a tensor has another shape
    Cost                   one broadcast of the tensors, 16 bytes a token on a first stage, 12 on a
                           last one, 28 on a stage that is both, and S more with a mask; a second
                           one for cu_seqlens.  The tensors of a batch are views of one buffer.
    Upstream               get_batch_on_this_tp_rank, which broadcasts one tensor at a time
    """
    batch = dict.fromkeys(_BATCH_KEYS)
    needed = _keys_of_stage(groups, create_attention_mask, mtp)
    if not needed:
        return batch
    if device is None:
        device = _device_of_group()
    device = torch.device(device)
    layout = _batch_layout(needed, micro_batch_size, sequence_length)
    packing = _batch_layout(_PACKING_KEYS, micro_batch_size, sequence_length)
    if groups.size("tp") == 1:
        for key, tensor in _read_batch(data_iterator, layout, packing).items():
            batch[key] = tensor.to(device, non_blocking=True)
    else:
        batch.update(_share_batch(data_iterator, layout, packing, groups, device))
    return batch


def _keys_of_stage(groups, create_attention_mask, mtp):
    """The tensors of a batch that this rank's pipeline stage needs."""
    first = groups.is_first_stage
    last = groups.is_last_stage
    keys = []
    if first or (last and mtp):
        keys += ["tokens", "position_ids"]
    if last:
        keys += ["labels", "loss_mask"]
    if (first or last) and create_attention_mask:
        keys.append("attention_mask")
    return keys


def _batch_layout(keys, micro_batch_size, sequence_length):
    """{key: (shape, dtype)} of tensors of a batch, the widest items first."""
    row = (micro_batch_size, sequence_length)
    layout = {
        "tokens": (row, torch.int64),
        "labels": (row, torch.int64),
        "position_ids": (row, torch.int64),
        "loss_mask": (row, torch.float32),
        "cu_seqlens": ((micro_batch_size, sequence_length + 1), torch.int32),
        "max_seqlen": ((micro_batch_size,), torch.int32),
        "attention_mask": ((micro_batch_size, 1, sequence_length, sequence_length), torch.bool),
    }
    return {key: layout[key] for key in layout if key in keys}


def _read_batch(data_iterator, layout, packing):
    """Read the next batch: the tensors of layout, and those of packing where the batch has them."""
    if data_iterator is None:
        raise ValueError("this rank reads for its group: give a data_iterator, not None")
    batch = next(data_iterator)
    if not isinstance(batch, dict):
        raise ValueError(f"wanted a batch as a dict of tensors, got {type(batch).__name__}")
    wanted = dict(layout)
    if any(batch.get(key) is not None for key in packing):
        wanted.update(packing)
    makes_mask = "attention_mask" in layout and batch.get("attention_mask") is None
    if makes_mask:
        del wanted["attention_mask"]
    _check_batch(batch, wanted)
    tensors = {}
    for key, (_, dtype) in wanted.items():
        tensors[key] = batch[key].to("cpu", dtype)
    if makes_mask:
        shape, _ = layout["attention_mask"]
        tensors["attention_mask"] = _causal_masks(shape, tensors.get("cu_seqlens"))
    return tensors


def _check_batch(batch, layout):
    """Raise ValueError unless the batch has the tensors of a layout, in its shapes."""
    for key, (shape, dtype) in layout.items():
        found = None
        if isinstance(batch.get(key), torch.Tensor):
            found = tuple(batch[key].shape)
        if found == shape and batch[key].is_floating_point() and not dtype.is_floating_point:
            raise ValueError(f"batch[{key!r}]: wanted {dtype}, got {batch[key].dtype}")
        if found != shape:
            raise ValueError(
                f"batch[{key!r}]: wanted shape {shape}, got {found}: give the loader and "
                "get_batch the same micro_batch_size and sequence_length"
            )


def _causal_masks(shape, cu_seqlens):
    """The masks of a batch, bool (B, 1, S, S); the documents of cu_seqlens are kept apart."""
    rows, _, length, _ = shape
    starts_of_rows = [[0]] * rows
    if cu_seqlens is not None:
        starts_of_rows = cu_seqlens.tolist()  # its unused entries are documents without tokens
    masks = [causal_mask(starts, length) for starts in starts_of_rows]
    return torch.from_numpy(np.stack(masks))


def _share_batch(data_iterator, layout, packing, groups, device):
    """What tp rank 0 reads, or its error, on every rank of its tensor-parallel group."""
    tensors = {}
    status = _PLAIN
    error = None
    if groups.rank("tp") == 0:
        try:
            tensors = _read_batch(data_iterator, layout, packing)
        except Exception as caught:
            status = _FAILED
            error = caught
        if "cu_seqlens" in tensors:
            status = _PACKED
        tensors["status"] = torch.tensor(status)
    layout = {"status": ((), torch.int64)} | layout
    buffer = _broadcast_tensors(tensors, layout, groups, device)
    status = _cut_views(buffer, layout)["status"].item()
    if status == _FAILED:
        _raise_error_of(0, error, groups.batch_group)  # tp rank 0 met it; see section 15
    batch = _cut_views(buffer.to(device, non_blocking=True), layout)
    del batch["status"]
    if status == _PACKED:
        buffer = _broadcast_tensors(tensors, packing, groups, device)
        batch.update(_cut_views(buffer.to(device, non_blocking=True), packing))
    return batch


def _broadcast_tensors(tensors, layout, groups, device):
    """Lay tensors end to end in one uint8 buffer on the CPU, and send it from tp rank 0 to all.

    The other ranks give no tensors.  The memory is pinned where the buffer goes on to a GPU, so
    that the CPU need not wait for that copy.
    """
    size = sum(math.prod(shape) * dtype.itemsize for shape, dtype in layout.values())
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    for key, view in _cut_views(buffer, layout).items():
        if key in tensors:
            view.copy_(tensors[key])
    torch.distributed.broadcast(buffer, group=groups.batch_group, group_src=0)
    return buffer


def _cut_views(buffer, layout):
    """{key: the tensor of the layout that lies in the buffer}, without a copy."""
    views = {}
    start = 0
    for key, (shape, dtype) in layout.items():
        size = math.prod(shape) * dtype.itemsize
        views[key] = buffer[start : start + size].view(dtype).view(shape)
        start += size
    return views


def get_batch_on_this_cp_rank(
    batch: dict[str, typing.Any],
    cp_rank: int,
    cp_size: int,
    *,
    use_per_sequence_balancing: bool = False,
) -> dict[str, typing.Any]:
    """This context-parallel rank's part of a batch: two of 2 * cp_size chunks.

    Rank r of cp ranks gets chunk r and chunk 2*cp-1-r, in that order.

    batch      dict; a tensor with the sequence axis (dim 1, of attention_mask dim 2) is cut; with
               cu_seqlens every document is cut by itself.  Everything else (None, dataset_id,
               cu_seqlens, max_seqlen) is passed on.
    use_per_sequence_balancing
               with cu_seqlens too, cut the whole sequence and not every document
    Returns    a new dict, with sequences of S / cp_size; the batch is not changed
    Raises     ValueError where S, or the length of a document, is no multiple of 2*cp_size
    Cost       a copy of the part; cu_seqlens on a GPU is read, which waits for the GPU
    Upstream   get_batch_on_this_cp_rank, which changes the batch

    >>> batch = {"tokens": torch.arange(8)[None]}
    >>> [get_batch_on_this_cp_rank(batch, rank, 2)["tokens"].tolist() for rank in (0, 1)]
    [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    >>> batch["cu_seqlens"] = torch.tensor([[0, 4, 8, 8, 8, 8, 8, 8, 8]])       # two documents
    >>> [get_batch_on_this_cp_rank(batch, rank, 2)["tokens"].tolist() for rank in (0, 1)]
    [[[0, 3, 4, 7]], [[1, 2, 5, 6]]]
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"wanted cp_size >= 1 and cp_rank below it, got {cp_size} and {cp_rank}")
    part = dict(batch)
    sequences = [batch[key] for key in _BATCH_KEYS if batch.get(key) is not None]
    if cp_size == 1 or not sequences:
        return part
    length = sequences[0].shape[-1]
    cu_seqlens = batch.get("cu_seqlens")
    if cu_seqlens is None or use_per_sequence_balancing:
        chunks_of_rows = [_chunks_of_sequence(length, cp_rank, cp_size)]
    else:
        chunks_of_rows = []
        for row, starts in enumerate(cu_seqlens.tolist()):
            chunks_of_rows.append(_chunks_of_documents(starts, length, cp_rank, cp_size, row))
    for key, value in batch.items():
        dim = 2 if key == "attention_mask" else 1
        if key not in ("dataset_id", *_PACKING_KEYS) and _has_axis(value, dim, length):
            part[key] = _take_chunks(value, dim, chunks_of_rows)
    return part


def _chunks_of_sequence(length, cp_rank, cp_size):
    """What a cp rank keeps of a sequence that is cut as a whole: [(begin, length), ...]."""
    if length % (2 * cp_size) != 0:
        raise ValueError(
            f"a sequence of {length} tokens cannot be cut for cp_size {cp_size}: "
            f"its length must be a multiple of {2 * cp_size}"
        )
    return _chunks_between(0, length, cp_rank, cp_size)


def _chunks_of_documents(starts, length, cp_rank, cp_size, row):
    """What a cp rank keeps of a row, each of whose documents is cut by itself."""
    bounds = sorted({0, *starts, length})  # cu_seqlens repeats the length in its unused entries
    chunks = []
    for document, (begin, end) in enumerate(itertools.pairwise(bounds)):
        if (end - begin) % (2 * cp_size) != 0:
            raise ValueError(
                f"document {document} of row {row} has {end - begin} tokens ({begin} to {end}): "
                f"cp_size {cp_size} wants a multiple of {2 * cp_size} in every document; "
                "use_per_sequence_balancing=True cuts the whole sequence instead"
            )
        chunks += _chunks_between(begin, end, cp_rank, cp_size)
    return chunks


def _chunks_between(begin, end, cp_rank, cp_size):
    """Chunk cp_rank from the front and chunk cp_rank from the back, of 2 * cp_size chunks."""
    size = (end - begin) // (2 * cp_size)
    front = begin + cp_rank * size
    back = end - (cp_rank + 1) * size
    return [(front, size), (back, size)]


def _has_axis(value, dim, length):
    """Whether value is a tensor whose axis number dim has this length."""
    return isinstance(value, torch.Tensor) and value.ndim > dim and value.shape[dim] == length


def _take_chunks(value, dim, chunks_of_rows):
    """The chunks of value along an axis, joined; all rows have the first list, or each its own."""
    if len(chunks_of_rows) == 1:
        parts = [value.narrow(dim, begin, size) for begin, size in chunks_of_rows[0]]
        return torch.cat(parts, dim)
    rows = []
    for row, chunks in zip(value, chunks_of_rows, strict=True):
        parts = [row.narrow(dim - 1, begin, size) for begin, size in chunks]
        rows.append(torch.cat(parts, dim - 1))
    return torch.stack(rows)


# ==============================================================================
# 10. Gradients
# ==============================================================================
# Question answered here: how do the data-parallel ranks come to have the same gradients?
#
# Each data-parallel rank computes the gradients of its own batch.  The average over all ranks is
# the gradient of the global batch, so all ranks take the same step and stay equal.  The average is
# made by a collective, which is a call that all ranks of a group make together:
#
#   all-reduce       every rank ends with the sum (or average) of the buffers of all ranks
#   reduce-scatter   the sum is cut into as many shards as there are ranks, and each rank ends with
#                    its own shard: enough for an optimizer that shares its work in the same way
#
#   parameters, as the module lists them embed  w1  w2  w3  head
#   buffer, one for each dtype: in       | head     | w3  w2   | w1  embed |   p.grad is a view
#   reverse, as backward makes them      | bucket 0 | bucket 1 | bucket 2  |
#   backward: head's gradient arrives      sent -->
#             w3's, w2's                              sent -->
#             w1's, embed's                                      sent -->
#   finish_grad_sync()                     waits for all
#
# A bucket is sent when its last gradient is there and all buckets before it are sent.  So all ranks
# send in the same order, whatever parameters their batches use.  A parameter without a gradient
# counts as zero; its bucket, and those behind it, are sent at the end.  A tied parameter, which the
# model has in two places, is one parameter, where named_parameters() lists it first.
#
# A training step, with all that part I has made:
#
#   model.zero_grad_buffer()
#   forward_backward_no_pipelining(...)   for each micro-batch: get_batch(), forward, backward; then
#                                         finalize_model_grads() waits for the averages
#   optimizer.step()
#   loader.state_dict()                   for a checkpoint: which samples were used (section 14)


@dataclasses.dataclass
class Bucket:
    """Parameters whose gradients are sent together, by one collective.

    Upstream: _ParamAndGradBucket.

    params   the parameters
    data     their gradients: a slice of the buffer, in the order of params
    waiting  the parameters whose gradient of this step has not come yet
    handle   the collective that is on its way, or None
    """

    params: list[torch.nn.Parameter]
    data: torch.Tensor
    waiting: set[torch.nn.Parameter]
    handle: "torch.distributed.Work | None" = None


class DistributedDataParallel(torch.nn.Module):
    """A model whose gradients are averaged over a group.  Upstream: DistributedDataParallel.

    module                     each of its parameters that requires a gradient gets main_grad and
                               grad, both the same view of the buffer of its dtype and device
    group                      the process group to average over; None: all ranks
    bucket_size                elements that are sent at once, at least (the last bucket has the
                               rest)
    overlap_grad_reduce        send each bucket during backward; False: all buckets at the end
    use_distributed_optimizer  reduce-scatter: only this rank's piece of each bucket, in
                               grad_shards, becomes the average; False: all-reduce
    average_in_collective      the collective divides by the number of ranks, where NCCL is the
                               backend; else gradients are divided by it before they are sent
    check_for_nan_in_grad      where a gradient is nan, finish_grad_sync() raises ValueError on
                               every rank, naming parameter and rank

    grad_buffers   list of tensors: the buffer of each dtype and device
    grad_shards    list of tensors: this rank's slice of each bucket

    A step is zero_grad_buffer(); forward and backward of each micro-batch, all but the last under
    no_sync(); finish_grad_sync(); the optimizer.

    >>> model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    >>> model.zero_grad_buffer()
    >>> model(torch.tensor([[3.0, 4.0]])).sum().backward()
    >>> model.finish_grad_sync()
    >>> model.grad_buffers[0].tolist(), model.module.weight.grad.tolist()
    ([3.0, 4.0], [[3.0, 4.0]])
    """

    def __init__(
        self,
        module: torch.nn.Module,
        group: "torch.distributed.ProcessGroup | None" = None,
        *,
        bucket_size: int = 40_000_000,
        overlap_grad_reduce: bool = False,
        use_distributed_optimizer: bool = False,
        average_in_collective: bool = False,
        check_for_nan_in_grad: bool = False,
    ) -> None:
        super().__init__()
        if bucket_size < 1:
            raise ValueError(f"bucket_size must be at least 1 element, got {bucket_size}")
        self.module = module
        self.group = group
        self.size = 1
        if _is_distributed():
            self.size = torch.distributed.get_world_size(group)
        self.overlap_grad_reduce = overlap_grad_reduce
        self.use_distributed_optimizer = use_distributed_optimizer
        self.average_in_collective = average_in_collective
        if self.size > 1 and torch.distributed.get_backend(group) != "nccl":
            # gloo refuses to average in torch 2.7, and adds without a word in torch 2.8
            self.average_in_collective = False
        self.check_for_nan_in_grad = check_for_nan_in_grad
        self.grad_buffers = []
        self.grad_shards = []
        self._names = {param: name for name, param in module.named_parameters()}
        self._buckets = []
        self._bucket_of = {}  # {parameter: number of its bucket}
        self._num_sent = 0  # buckets that were sent in this step
        self._in_sync = True  # False under no_sync()
        # False from finish_grad_sync() until a gradient comes or zero_grad_buffer() begins a step
        self._must_send = True
        self._nan_names = []  # parameters with nan in what was sent in this step
        for runs in self._runs_of_parameters(bucket_size):
            self._add_buffer(runs)
        for param in self._bucket_of:
            param.register_post_accumulate_grad_hook(_GradientHook(self))
        self.zero_grad_buffer()

    def _runs_of_parameters(self, bucket_size):
        """For each dtype and device: a list of runs, the parameters of one bucket each."""
        runs_of = {}
        for param in reversed(self._names):
            if not param.requires_grad:
                continue
            runs = runs_of.setdefault((param.dtype, param.device), [[]])
            if _num_elements(runs[-1]) >= bucket_size:
                runs.append([])
            runs[-1].append(param)
        return runs_of.values()

    def _add_buffer(self, runs):
        """Make the buffer of one dtype, its buckets, and the view of each parameter."""
        # A bucket is padded with zeros, so that it can be cut into one shard a rank.
        sizes = []
        for run in runs:
            shard = _ceil_div(_num_elements(run), self.size)
            sizes.append(shard * self.size)
        first = runs[0][0]
        buffer = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self.grad_buffers.append(buffer)
        for params, data in zip(runs, buffer.split(sizes), strict=True):
            start = 0
            for param in params:
                param.main_grad = data[start : start + param.numel()].view(param.shape)
                self._bucket_of[param] = len(self._buckets)
                start += param.numel()
            self.grad_shards.append(data.chunk(self.size)[_rank(self.group)])
            self._buckets.append(Bucket(params, data, waiting=set(params)))

    def forward(self, *inputs: typing.Any, **kwargs: typing.Any) -> typing.Any:
        """Call the module."""
        return self.module(*inputs, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> typing.Iterator[None]:
        """In this block, backward adds to the gradients and sends nothing.

        Use it for all micro-batches of a step but the last one.
        """
        before = self._in_sync
        self._in_sync = False
        try:
            yield
        finally:
            self._in_sync = before

    def _on_gradient(self, param):
        """Note that backward has added to param.grad; send the buckets that are complete now."""
        number = self._bucket_of[param]
        if number < self._num_sent:
            raise RuntimeError(
                f"gradient of {self._names[param]} after it was sent: put all backwards of a step "
                "but the last under no_sync()"
            )
        if param.grad is not param.main_grad:
            # Somebody has set param.grad to None, which means zero, and backward made a new tensor.
            param.main_grad.copy_(param.grad)
            param.grad = param.main_grad
        self._must_send = True
        if self._in_sync and self.overlap_grad_reduce:
            self._buckets[number].waiting.discard(param)
            while self._num_sent < len(self._buckets):
                if self._buckets[self._num_sent].waiting:
                    break
                self._send_next_bucket()

    def _send_next_bucket(self):
        """Start the collective of the first bucket that was not sent yet."""
        bucket = self._buckets[self._num_sent]
        shard = self.grad_shards[self._num_sent]
        self._num_sent += 1
        for param in bucket.params:
            if param.grad is None:
                param.main_grad.zero_()
                param.grad = param.main_grad
            if self.check_for_nan_in_grad and param.main_grad.isnan().any():
                self._nan_names.append(self._names[param])
        if self.size == 1:
            return
        operation = torch.distributed.ReduceOp.AVG
        if not self.average_in_collective:
            operation = torch.distributed.ReduceOp.SUM
            bucket.data.mul_(1 / self.size)
        if self.use_distributed_optimizer:
            bucket.handle = _reduce_scatter(
                shard, bucket.data, operation, self.group, async_op=True
            )
        else:
            bucket.handle = torch.distributed.all_reduce(
                bucket.data, operation, self.group, async_op=True
            )

    def start_grad_sync(self) -> None:
        """Send the buckets that were not sent during backward."""
        if not self._must_send:
            return
        while self._num_sent < len(self._buckets):
            self._send_next_bucket()

    def finish_grad_sync(self) -> None:
        """Send what is left and wait for all buckets.

        Nothing is sent if since the last call neither a gradient has come nor zero_grad_buffer()
        has begun a step.  Every rank must call this method, and with check_for_nan_in_grad it
        raises ValueError on every rank.
        """
        self.start_grad_sync()
        self._wait_and_reset()
        self._must_send = False
        if self.check_for_nan_in_grad:
            on_every_rank(self._check_for_nan, self.group)

    def _wait_and_reset(self):
        """Wait for what was sent; from now on every gradient is expected again."""
        for bucket in self._buckets:
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
            bucket.waiting = set(bucket.params)
        self._num_sent = 0

    def _check_for_nan(self):
        """Raise ValueError if this rank has sent nan."""
        names = self._nan_names
        self._nan_names = []
        if names:
            raise ValueError(f"nan in the gradients of {len(names)} parameters: {', '.join(names)}")

    def zero_grad_buffer(self) -> None:
        """Begin a step: every gradient is 0, and every param.grad a view of the buffers again.

        A rank whose batch gives no gradient at all then sends zeros, so that nobody waits for it.
        """
        self._wait_and_reset()
        self._must_send = True
        self._nan_names = []
        for param in self._bucket_of:  # the padding between them is 0 from the beginning
            param.main_grad.zero_()
            param.grad = param.main_grad

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients by a factor."""
        for buffer in self.grad_buffers:
            buffer.mul_(factor)

    def broadcast_params(self) -> None:
        """Give every rank the parameters of the group's first rank, frozen ones included."""
        if self.size == 1:
            return
        for param in self._names:
            torch.distributed.broadcast(param.data, group=self.group, group_src=0)


class _GradientHook:
    """Tells a DistributedDataParallel of each new gradient, for as long as that wrapper lives.

    A parameter keeps its hooks.  With a weak reference a wrapper that was dropped is freed, and its
    module can be used without it or be wrapped again.
    """

    def __init__(self, wrapper):
        self.wrapper = weakref.ref(wrapper)

    def __call__(self, param):
        wrapper = self.wrapper()
        if wrapper is not None:
            wrapper._on_gradient(param)


def _num_elements(params):
    """The number of elements of all these parameters together."""
    return sum(param.numel() for param in params)


def _reduce_scatter(output, data, operation, group, async_op):
    """torch.distributed.reduce_scatter_single, which older versions of torch name otherwise."""
    function = getattr(torch.distributed, "reduce_scatter_single", None)
    if function is None:
        function = torch.distributed.reduce_scatter_tensor
    return function(output, data, operation, group, async_op)


def finalize_model_grads(
    model: list[DistributedDataParallel],
    num_tokens: int | torch.Tensor | None = None,
    groups: ParallelGroups | None = None,
) -> None:
    """Finish the gradients of a step.  Upstream: finalize_model_grads.

    model       the parts of the model on this rank
    num_tokens  tokens of this rank that count, int or tensor; all ranks must give the same type.
                The loss was a sum over tokens then.  The gradients, which are an average over the
                ranks, are multiplied by ranks / tokens of all ranks, and so become the gradients of
                the mean loss of a token.  None: the gradients stay as they are.
    groups      count the tokens of the dp-cp ranks of this layout; None: those of each part's group
    Cost        finish_grad_sync() of each part, and an all_reduce of one number

    >>> model = DistributedDataParallel(torch.nn.Embedding(257, 1))    # a weight for each token
    >>> model(torch.tensor([97, 97, 97, 98])).sum().backward()         # a a a b
    >>> finalize_model_grads([model], num_tokens=4)
    >>> model.module.weight.grad[97:99, 0].tolist()                    # a share of the four tokens
    [0.75, 0.25]
    """
    for part in model:
        part.finish_grad_sync()
        if num_tokens is None:
            continue
        total = torch.as_tensor(num_tokens, device=_device_of_group(part.group)).clone()
        if part.size > 1:
            group = part.group
            if groups is not None:
                group = groups.group("dp-cp")
            torch.distributed.all_reduce(total, group=group)
        total = total.item()
        if total != 0:  # without a token that counts, all gradients are 0 already
            part.scale_gradients(part.size / total)


def forward_backward_no_pipelining(
    *,
    forward_step_func: typing.Callable,
    data_iterator: typing.Iterator | None,
    model: torch.nn.Module | typing.Sequence[torch.nn.Module],
    num_microbatches: int,
    forward_only: bool = False,
) -> list[typing.Any]:
    """Run the micro-batches of a step and finish the gradients.  Upstream: the same name.

    forward_step_func  (data_iterator, model) -> (output, loss_func).  loss_func(output) is
                         (loss, report)   the gradients become those of the mean of the losses of
                                          all micro-batches
                         (sum of losses, num_tokens, report)   they become those of the mean loss of
                                          a token, over all micro-batches; where the model is a
                                          DistributedDataParallel, over all ranks too
    data_iterator      is passed on to forward_step_func
    model              a DistributedDataParallel, a plain module, or a list of one of these
    num_microbatches   how many to run, at least 1
    forward_only       no backward, and nothing is sent; call it under torch.no_grad()
    Returns            the reports, one a micro-batch

    >>> def sum_of_tokens(output):
    ...     return output.sum(), output.shape[0], "sum and tokens"
    >>> def step(data, model):
    ...     return model(next(data)), sum_of_tokens
    >>> model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    >>> forward_backward_no_pipelining(forward_step_func=step, model=model, num_microbatches=2,
    ...     data_iterator=iter([torch.ones(3, 1), torch.zeros(1, 1)]))
    ['sum and tokens', 'sum and tokens']
    >>> model.module.weight.grad.item()                                   # (1 + 1 + 1 + 0) / 4
    0.75
    """
    parts = [model]
    if isinstance(model, (list, tuple)):
        parts = list(model)
    if len(parts) != 1:
        raise ValueError(f"without pipelining there is one model, got a list of {len(parts)}")
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches must be at least 1, got {num_microbatches}")
    model = parts[0]
    reports = []
    token_counts = []
    for number in range(num_microbatches):
        is_last = number == num_microbatches - 1
        with _sync_only_if(is_last, model):
            output, loss_func = forward_step_func(data_iterator, model)
            result = loss_func(output)
            if len(result) == 3:
                loss, tokens, report = result
                token_counts.append(tokens)
            else:
                loss, report = result
                loss = loss / num_microbatches
            if not forward_only:
                loss.backward()
        reports.append(report)
    if not forward_only:
        num_tokens = None
        if token_counts:
            num_tokens = sum(token_counts)
        _finish_step(model, num_tokens)
    return reports


def _sync_only_if(is_last, model):
    """A context in which backward sends gradients only in the last micro-batch of a step."""
    if is_last or not isinstance(model, DistributedDataParallel):
        return contextlib.nullcontext()
    return model.no_sync()


def _finish_step(model, num_tokens):
    """Finish the gradients of a wrapped model, or divide those of a plain one by its tokens."""
    if isinstance(model, DistributedDataParallel):
        finalize_model_grads([model], num_tokens)
    elif num_tokens is not None and num_tokens != 0:
        for param in model.parameters():
            if param.grad is not None:
                param.grad /= num_tokens


# ==============================================================================
# PART II: THE WORKSHOP
# ==============================================================================
#
# ==============================================================================
# 11. Whole files
# ==============================================================================
# Question answered here: how does a file appear whole, or not at all?
#
#   write   corpus.bin.1f0c9e2ab47d6835.tmp      a new file beside the old one, with a random name
#   sync    the same                             the operating system has written it to the disk
#   rename  corpus.bin                           in one step: a reader finds the old or the new one
#
# Object storage has no rename.  There the temporary file is a local one, in the folder TMPDIR, and
# in the place of the rename it is uploaded as a whole: readers find the old object until the upload
# is complete.
#
# After an error, or Ctrl-C, or SIGTERM in our commands, the temporary file is removed.  A process
# that is killed (kill -9, no power, a second signal meanwhile) leaves it behind; it can be deleted
# by hand.


class NewFile:
    """A binary file that appears as path, whole, at commit().

    synced     have the disk hold the file before it gets its name; False for what can be made again
    file       the open file, to write to
    temporary  its name until commit()
    is_kept    True: discard() leaves it, because it is finished, and could not be uploaded

    In a with block the file is committed at the end, or removed if an exception ends the block.
    OSError if the folder is missing, or the disk is full.

    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "notes")
    >>> with NewFile(path) as file:
    ...     _ = file.write(b"aaaa")
    ...     os.path.exists(path)
    False
    >>> os.path.getsize(path)
    4
    >>> folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike, synced: bool = True) -> None:
        self.path = os.fspath(path)
        self.synced = synced
        self.is_kept = False
        unique_name = f"{self.path}.{secrets.token_hex(8)}.tmp"
        if is_remote(self.path):
            # A wrong URL, or a missing right, is an error now and not after hours of work.
            file_exists(self.path)
            self.temporary = os.path.join(tempfile.gettempdir(), os.path.basename(unique_name))
        else:
            folder = os.path.dirname(self.path)
            if folder and not os.path.isdir(folder):
                raise FileNotFoundError(f"{folder}: no such folder")
            self.temporary = unique_name
        self.file = io.BufferedWriter(_NamedFile(self.temporary, "xb"), 1 << 20)
        # Readers of the old file keep their rights.  There may be no old file, and some file
        # systems, such as vfat, refuse to set rights.
        with contextlib.suppress(OSError):
            shutil.copymode(self.path, self.temporary)

    def sync(self) -> None:
        """Have the disk hold all that was written; OSError if it is full."""
        self.file.flush()
        with _errors_name(self.temporary):
            os.fsync(self.file.fileno())

    def finish(self) -> None:
        """Close the whole file; it has its temporary name still."""
        if self.synced:
            self.sync()
        self.file.close()

    def commit(self) -> None:
        """Give the file its name.  If it cannot be uploaded it is kept, and the error says so."""
        if not self.file.closed:
            self.finish()
        if not is_remote(self.path):
            os.replace(self.temporary, self.path)
            return
        try:
            self._upload()
        except OSError as error:
            raise _keep(error, self) from None

    def _upload(self):
        """Write the finished file as the object that it is to be."""
        RemoteFile(self.path).upload(self.temporary)
        os.unlink(self.temporary)

    def discard(self) -> None:
        """Remove the file; after commit() this does nothing."""
        with contextlib.suppress(OSError):  # a full disk refuses what is not yet written
            self.file.close()
        if self.is_kept:
            return
        with contextlib.suppress(OSError):  # it has its name already, or the disk refuses this too
            os.unlink(self.temporary)

    def __enter__(self) -> typing.BinaryIO:
        return self.file

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self.commit()
        finally:
            self.discard()


class _NamedFile(io.FileIO):
    """A file whose errors name it: Python's own say "[Errno 28] No space left on device" alone."""

    def write(self, content):
        with _errors_name(self.name):
            return super().write(content)


@contextlib.contextmanager
def _errors_name(path):
    """Have an OSError of this block name a file."""
    try:
        yield
    except OSError as error:
        error.filename = path
        raise


def commit_pair(tokens: NewFile, index: NewFile) -> None:
    """Give a .bin and its .idx their names; an old .idx never stands beside a new .bin.

    The disk has both files, whole, before one gets its name; OSError if it is full.  If the .bin
    cannot be renamed, the old pair stays as it was.  If one of the two cannot be uploaded, they are
    kept, and the error says how to upload them.
    """
    tokens.sync()
    index.sync()
    record = f"{index.path.removesuffix('.idx')}.record.json"  # of the old pair: see section 18
    if is_remote(index.path):
        try:
            RemoteFile(record).remove()
            RemoteFile(index.path).remove()
            tokens.finish()
            tokens._upload()
        except OSError as error:
            raise _keep(error, tokens, index) from None
    else:
        pathlib.Path(record).unlink(missing_ok=True)
        _rename_without_old_index(tokens, index)
    index.commit()


def _keep(error, *files):
    """Keep finished files that were not uploaded; return the error that says how to do it."""
    for file in files:
        file.is_kept = True
    places = ", then ".join(f"{file.temporary} as {file.path}" for file in files)
    return OSError(f"{error}; upload {places}")


def _rename_without_old_index(tokens, index):
    """Give a .bin its name while the old .idx has another one, which it keeps only on an error."""
    old_index = f"{index.temporary.removesuffix('.tmp')}.old.tmp"
    if os.path.isdir(index.path):
        raise IsADirectoryError(f"{index.path} is a folder: wanted the place of a file")
    with contextlib.suppress(FileNotFoundError):
        os.replace(index.path, old_index)
    try:
        tokens.commit()
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.replace(old_index, index.path)
        raise
    pathlib.Path(old_index).unlink(missing_ok=True)


def map_file(path: str | os.PathLike) -> np.ndarray:
    """Map a file into memory, read-only, as an array of bytes that keeps its mapping alive.

    Returns uint8 (size of the file,); OSError if there is no such file.  Cost: O(1), whatever the
    size: a page is read when one of its bytes is used for the first time.

    >>> map_file(get_bin_path(toy_corpus()))[:5].tobytes()
    b'aaaab'
    """
    if os.path.getsize(path) == 0:
        return np.empty(0, np.uint8)  # an empty file cannot be mapped
    return np.asarray(np.memmap(path, np.uint8, "r"))


# -- What a builder takes ----------------------------------------------------------------------


def _encode_tokens(values, dtype):
    """Tensor, array or list -> the bytes that a .bin file of this dtype has for these ids.

    ValueError at the first id that does not fit, where upstream may wrap it.  Tokens of a
    floating-point dtype, which the format knows too, are converted as numpy does.
    """
    if not isinstance(values, np.ndarray):
        values = _as_array(values, dtype)
    ids = np.asarray(values).reshape(-1)
    if ids.dtype == dtype or dtype.kind == "f" or len(ids) == 0:
        return ids.astype(dtype, copy=False).tobytes()
    if ids.dtype.kind not in "biu":  # bool, signed, unsigned
        raise ValueError(f"{dtype} tokens must be integers, got {ids.dtype}")
    tokens = ids.astype(dtype)
    misfits = np.flatnonzero(tokens != ids)
    if len(misfits):
        at = misfits[0]
        raise ValueError(f"token {ids[at]} at {at} does not fit {dtype}: choose a larger dtype")
    return tokens.tobytes()


def _as_array(values, dtype):
    """Tensor or list -> array; it is of dtype already if a list holds only integers that fit."""
    if isinstance(values, torch.Tensor):
        return values.numpy(force=True)  # from any device
    if isinstance(values, list):
        # numpy would find the least common dtype of the items first, and then convert once more.
        with contextlib.suppress(TypeError, OverflowError):
            return np.frombuffer(array.array(dtype.char, values), dtype)
    return np.asarray(values)


def _as_tokens(values, dtype):
    """Tensor, array or list -> 1-D array of dtype; ValueError at an id that does not fit."""
    return np.frombuffer(_encode_tokens(values, dtype), dtype)


def _as_compact_array(values, typecode, name):
    """Integers -> array.array, a few bytes each.

    ValueError if one does not fit the typecode, TypeError if one is no integer.
    """
    try:
        return array.array(typecode, values)
    except OverflowError:
        bits = 8 * array.array(typecode).itemsize
        raise ValueError(f"{name}: {values!s:.60} does not fit {bits} bits") from None


def _as_arrays(documents, dtype):
    """Return the tokens of each document as an array of dtype.

    documents   a list of tensors, arrays or lists; or an array of the package awkward, whose
                tokens are laid end to end already

    >>> _as_arrays([np.array([97, 97]), [98]], np.dtype(np.uint16))
    [array([97, 97], dtype=uint16), array([98], dtype=uint16)]
    """
    if not type(documents).__module__.startswith("awkward"):
        return [_as_tokens(document, dtype) for document in documents]
    import awkward  # it is there: it has made the documents

    tokens = _as_tokens(np.asarray(awkward.flatten(documents)), dtype)
    ends = np.cumsum(np.asarray(awkward.num(documents))).tolist()
    return [tokens[begin:end] for begin, end in itertools.pairwise([0, *ends])]


def _append_pair(builder, path_prefix):
    """What IndexedDatasetBuilder.add_index() does."""
    source = get_bin_path(path_prefix)
    target = builder._bin.path
    if os.path.realpath(source) == os.path.realpath(target):
        raise ValueError(f"{source} is both input and output: choose another output prefix")
    other = IndexedDataset(path_prefix, multimodal=builder.multimodal, check=True)
    if other.dtype != builder.dtype:
        raise ValueError(
            f"{source} holds {other.dtype.__name__} tokens, "
            f"wanted {builder.dtype.__name__} as in {target}"
        )
    without_modes = 34 + 12 * len(other) + 8 * len(other.document_indices)
    if not builder.multimodal and len(other._idx_content) > without_modes:
        raise ValueError(
            f"{source} is one of a multimodal pair: to keep its modes, give --multimodal, or "
            "multimodal=True"
        )
    before = len(builder.sequence_lengths)
    for tokens in other.blocks_of_tokens():
        builder._write(tokens)
    builder.sequence_lengths.frombytes(other.sequence_lengths.tobytes())
    builder.document_indices.frombytes((other.document_indices[1:] + before).tobytes())
    if builder.multimodal:
        builder.sequence_modes.frombytes(other.sequence_modes.tobytes())


def _check_size(file, size):
    """OSError unless a NewFile holds so many bytes."""
    file.file.flush()
    found = os.path.getsize(file.temporary)
    if found != size:
        raise OSError(f"{file.path}: wanted {size} bytes, got {found}: a write has failed")


# ==============================================================================
# 12. The index cache
# ==============================================================================
# Question answered here: when may arrays made earlier be used again?
#
# The name of the files is a digest of what was asked for.  What the arrays were made from, and what
# they are, stands in a manifest, which is written last:
#
#   <hash>-GPTDataset-train-description.txt      what was asked for; hash is the md5 of this text
#                          -document_index.npy   and -sample_index.npy, -shuffle_index.npy
#                          -manifest.json        what the arrays were made from; the size and the
#                                                CRC-32 of each file
#
#   found                                          then
#   nothing                                        the arrays are built and saved
#   a manifest that matches                        the arrays are used (rank 0 reads the files to
#                                                  check the CRCs, the other ranks check sizes)
#   arrays without manifest (upstream's cache,     built and saved: the same bytes
#   or one whose making was cut off)
#   anything else: torn, altered, of other data    built and saved, with a warning that says why
#   a folder that cannot be written                built, with a warning; they stay in memory


# what a torn array, or a manifest that somebody else wrote, can lead to
_FAULTS = (
    OSError,
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)


def describe(identifiers: dict) -> str:
    """Return the text that upstream writes for these identifiers.

    >>> print(describe({"class": "GPTDataset", "random_seed": 1234}))
    {
        "class": "GPTDataset",
        "random_seed": 1234
    }
    """
    return json.dumps(identifiers, indent=4, default=_identifiers_of)


def _identifiers_of(value):
    """What stands in a description for a value that JSON does not know, such as a tokenizer."""
    return value.unique_identifiers


def _md5(data):
    """Hex digest of a text or bytes, for names and comparisons; it protects nothing."""
    if isinstance(data, str):
        data = data.encode()
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


class IndexCache:
    """Index arrays in .npy files: loaded if they are there and right, else built and saved.

    folder       where the files are; None: the arrays stay in memory
    stem         what all file names begin with
    names        names of the arrays: <folder>/<stem>-<name>.npy
    description  text of the description file
    made_from    JSON-able dict of what the arrays are made from; a cache of other data is stale

    cache[name] is an array, mapped from its file where there is one.  A pickle of a cache whose
    arrays are saved has the paths alone, and maps the files again; else it has the arrays.

    >>> def two_orders():
    ...     return [np.array([2, 0, 1]), np.array([0, 1])]
    >>> folder = tempfile.TemporaryDirectory()
    >>> for build in two_orders, None:                      # the second time nothing is built
    ...     cache = IndexCache(folder.name, "toy", ["documents", "samples"], describe({}))
    ...     cache.load_or_build(build)
    >>> cache["documents"].tolist(), os.path.basename(cache.path("documents.npy"))
    ([2, 0, 1], 'toy-documents.npy')
    >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | os.PathLike | None,
        stem: str,
        names: typing.Sequence[str],
        description: str,
        made_from: dict | None = None,
    ) -> None:
        if folder and is_remote(folder):
            name = hide_credentials(folder)
            raise ValueError(f"path_to_cache must be a local folder, which is mapped, got {name}")
        self.folder = folder if folder else None
        self.stem = stem
        self.names = names
        self.description = description
        # The format is a number to raise when the same made_from comes to mean other arrays.
        self.made_from = {"format": 2}
        if made_from is not None:
            self.made_from |= made_from
        self._arrays = None  # {name: array}
        self._is_saved = False  # do the files hold these arrays?
        self.is_trusted = False  # was the cache taken without any check?

    def path(self, file: str) -> str:
        """Return the path of one of the files: an array's, the description's or the manifest's."""
        return os.path.join(self.folder, f"{self.stem}-{file}")

    def __getitem__(self, name: str) -> np.ndarray:
        if self._arrays is None:
            self._arrays = self._map_arrays()
        return self._arrays[name]

    def __setitem__(self, name: str, values: np.ndarray) -> None:
        """Put another array in the place of one, in memory; the files stay as they are."""
        arrays = {}
        if self._arrays is not None:
            arrays = self._arrays
        elif self._is_saved:
            arrays = self._map_arrays()
        self._arrays = arrays | {name: values}
        self._is_saved = False

    def load_or_build(
        self,
        build: typing.Callable[[], typing.Iterable[np.ndarray]],
        trust: bool = False,
        defer: bool = False,
    ) -> None:
        """Load the arrays, or build and save them.

        build   makes the arrays, in the order of names; its errors pass through.  An array that it
                has yielded must stay as it is, because a thread may be writing it
        trust   use a cache that exists, without any check
        defer   keep no file open; map the files at the first access
        """
        if self.folder is None:
            self._arrays = dict(zip(self.names, build(), strict=True))
            return
        if trust and self.exists():
            self.is_trusted = True
            self._is_saved = True
            return
        if self._load():
            self._is_saved = True
        else:
            self._build_and_save(build)
        if defer:
            self.close()

    def close(self) -> None:
        """Keep no file open; the files are mapped at the next access.  Unsaved arrays stay."""
        if self._is_saved:
            self._arrays = None

    def exists(self) -> bool:
        """Are all files there that upstream looks for?"""
        if self.folder is None:
            return False
        files = [f"{name}.npy" for name in self.names] + ["description.txt"]
        return all(os.path.isfile(self.path(file)) for file in files)

    def _load(self):
        """Map the arrays -> whether a manifest vouches for them; a wrong one is warned of."""
        manifest = pathlib.Path(self.path("manifest.json"))
        try:
            if not manifest.exists():
                return False
            text = manifest.read_text("utf-8")
            fault = self._find_fault(json.loads(text))
            if fault is None:
                self._arrays = self._map_arrays()
                # Whoever replaces the files removes the manifest first.  So if it is still there,
                # the files that were mapped are those that were checked.
                if manifest.read_text("utf-8") == text:
                    return True
                fault = "another process replaces it"
        except _FAULTS as error:
            fault = f"{type(error).__name__}: {error}"
        if manifest.exists():  # if not, another process is writing the cache anew
            name = os.path.join(self.folder, self.stem)
            warnings.warn(f"the cache {name} is rebuilt: {fault}", stacklevel=2)
        return False

    def _find_fault(self, manifest):
        """What is wrong with the files, as a sentence, or None; errors mean torn files too."""
        description = pathlib.Path(self.path("description.txt")).read_text("utf-8")
        if description != self.description:
            return "its description is of another dataset"
        for key, value in self.made_from.items():
            if manifest["made_from"].get(key) != value:
                return f"{key} was {manifest['made_from'].get(key)!r}, is {value!r}"
        noted = [manifest["files"][name] for name in self.names]
        with concurrent.futures.ThreadPoolExecutor(len(noted)) as pool:  # a core for each file
            found = list(pool.map(self._describe_array, self.names, noted))
        for name, before, now in zip(self.names, noted, found, strict=True):
            if now != before:
                return f"{name}.npy was {before}, is {now}"
        return None

    def _describe_array(self, name, noted):
        """What a manifest of now would say of the file of an array.

        To read a whole file takes a third of a second for each GiB, so rank 0 does it for all; the
        other ranks look at the size, and believe the noted CRC.
        """
        path = self.path(f"{name}.npy")
        if _rank() == 0:
            return _describe_file(path)
        return {"size": os.path.getsize(path), "crc32": noted["crc32"]}

    def _map_arrays(self):
        """The arrays of the files, read-only."""
        return {name: _map_npy(self.path(f"{name}.npy")) for name in self.names}

    def _build_and_save(self, build):
        """Build the arrays and save them; where they cannot be saved, they stay in memory.

        While an array is made, a thread writes the large ones that were made before it.  No file
        gets its name until all arrays are made: an error of the build leaves all files as they
        were.
        """
        arrays = {}
        pending = {}  # a future for each array that a thread writes
        # The pool is left first: no file is removed while a thread still writes it.
        with contextlib.ExitStack() as leftovers, concurrent.futures.ThreadPoolExecutor() as pool:
            for name, values in zip(self.names, build(), strict=True):
                arrays[name] = values
                if values.nbytes >= _WORTH_A_THREAD:
                    pending[name] = pool.submit(self._write_array, name, values, leftovers)
            self._arrays = arrays
            try:
                self._arrays = self._save(pending, leftovers)
                self._is_saved = True
            except OSError as error:
                warnings.warn(
                    f"the index cache {os.path.join(self.folder, self.stem)} cannot be written "
                    f"({error}): the indices stay in memory; set path_to_cache to a folder that "
                    "can be",
                    stacklevel=2,
                )

    def _save(self, pending, leftovers):
        """Write what no thread writes, give all files their names, and return the mapped arrays.

        The old manifest is removed first, and the new one is the last to get its name: so a crash
        on the way leaves none beside files of which some are new.
        """
        written = {}
        for name, values in self._arrays.items():
            if name not in pending:
                written[name] = self._write_array(name, values, leftovers)
        description = self._write_text("description.txt", self.description, leftovers)
        for name, future in pending.items():
            written[name] = future.result()
        new_files = [written[name].new_file for name in self.names]
        files = {name: written[name].facts for name in self.names}
        text = json.dumps({"made_from": self.made_from, "files": files}, indent=4)
        manifest = self._write_text("manifest.json", text, leftovers)
        for file in ("manifest.json", "description.txt"):
            pathlib.Path(self.path(file)).unlink(missing_ok=True)
        for new_file in [*new_files, description, manifest]:
            new_file.commit()
        return {name: written[name].mapped for name in self.names}

    def _open_new(self, file, leftovers):
        """Open a file of the cache; leftovers removes it unless it gets its name."""
        os.makedirs(self.folder, exist_ok=True)
        new_file = NewFile(self.path(file))
        leftovers.callback(new_file.discard)
        return new_file

    def _write_text(self, file, text, leftovers):
        """Write a text file, which has no name yet."""
        new_file = self._open_new(file, leftovers)
        new_file.file.write(text.encode())
        new_file.finish()
        return new_file

    def _write_array(self, name, values, leftovers):
        """Write one .npy file, which has no name yet: the bytes that numpy.save() would write."""
        values = np.ascontiguousarray(values)
        header = _npy_header(values)
        new_file = self._open_new(f"{name}.npy", leftovers)
        new_file.file.write(header)
        crc32 = zlib.crc32(header)
        content = values.reshape(-1).view(np.uint8)
        for start in range(0, len(content), _PIECE):
            piece = content[start : start + _PIECE]
            new_file.file.write(piece)
            crc32 = zlib.crc32(piece, crc32)
        new_file.finish()
        # Mapped under the temporary name: a moment later another job, with other data, may have put
        # a file of its own under the final one.
        mapped = np.memmap(new_file.temporary, values.dtype, "r", len(header), values.shape)
        facts = {"size": len(header) + len(content), "crc32": crc32}
        return _WrittenArray(new_file, facts, np.asarray(mapped))

    def __getstate__(self):
        """Without arrays that the other process can map."""
        state = self.__dict__.copy()
        if self._is_saved:
            state["_arrays"] = None
        return state


class _WrittenArray(typing.NamedTuple):
    """An array in a file that has no name yet."""

    new_file: NewFile
    facts: dict  # what the manifest says of the file
    mapped: np.ndarray


_WORTH_A_THREAD = 1 << 18  # bytes; smaller arrays are on a local disk before a thread starts

# Arrays are written, and read to check them, in pieces of so many bytes.  A piece fits the CPU's
# cache; and one write of many MiB at times takes ten times as long as the same bytes in pieces.
_PIECE = 1 << 18


def _describe_file(path):
    """What the manifest says of the file of an array: its size and its CRC-32."""
    piece = memoryview(bytearray(_PIECE))
    crc32 = 0
    with open(path, "rb", buffering=0) as file:
        size = file.readinto(piece)
        while size > 0:
            crc32 = zlib.crc32(piece[:size], crc32)
            size = file.readinto(piece)
        return {"size": file.tell(), "crc32": crc32}


# numpy parses the header of a file with Python's own parser, which Python 3.11 does not bear in two
# threads at once (SystemError: AST constructor recursion depth mismatch).
_parser_lock = threading.Lock()


def _map_npy(path):
    """The array of a file, mapped, read-only.  numpy is told never to unpickle anything."""
    try:
        with _parser_lock:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except OSError:
        raise
    except Exception as error:  # numpy's parser of headers raises errors of many kinds
        raise DatasetFormatError(f"{path}: no whole .npy file: {error}") from error


def _npy_header(values):
    """The first bytes of the .npy file of an array."""
    header = io.BytesIO()
    facts = np.lib.format.header_data_from_array_1_0(values)
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


# ==============================================================================
# 13. Token sources
# ==============================================================================
# Question answered here: how are tokens read from a mapping, a file, or object storage?
#
#   IndexedDataset  --read(first token, count)-->  MappedTokens   a view of the mapped .bin file
#                                                  FileTokens     a new array, read with os.pread
#                                                  RemoteTokens   a range of a remote object
#
# Object storage is everything with a name such as s3://bucket/corpus or https://host/corpus, read
# with the package fsspec, which comes with torch.  The .idx is copied to a local folder, once, and
# mapped.  Of the .bin only what a sample needs is read, and the parts of a batch at the same time:
#
#   read_many([(0, 5), (900, 3)])   exact ranges   |#####|                            |###|
#                                   blocks         |#####...............|.............###.|.....
#
# Blocks serve where neighbours are read soon after, as when a corpus is copied; shuffled samples
# have no such neighbours.


@dataclasses.dataclass
class ObjectStorageConfig:
    """How pairs on object storage are read.  Upstream: ObjectStorageConfig.

    path_to_idx_cache   folder for copies of .idx files; None: megatron_min in the folder of the
                        user's caches, $XDG_CACHE_HOME or ~/.cache
    bin_chunk_nbytes    0: read just the bytes that are asked for; else read the .bin in blocks of
                        so many bytes, and keep the last eight (upstream's default: 256 MiB);
                        a read holds twice as many for a moment

    Copies of .idx files are never removed: an object that changes leaves its old copy behind.
    """

    path_to_idx_cache: str | os.PathLike | None = None
    bin_chunk_nbytes: int = 0

    def __post_init__(self) -> None:
        if self.bin_chunk_nbytes < 0:
            raise ValueError(f"bin_chunk_nbytes must be >= 0, got {self.bin_chunk_nbytes}")
        if is_remote(self.folder):
            name = hide_credentials(self.folder)
            raise ValueError(f"path_to_idx_cache must be a local folder, got {name}")

    @property
    def folder(self) -> str:
        """The folder for copies of .idx files."""
        if self.path_to_idx_cache is not None:
            return os.fspath(self.path_to_idx_cache)
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return os.path.join(caches, "megatron_min")


class TokenSource(abc.ABC):
    """The tokens of a .bin file, counted from 0."""

    @abc.abstractmethod
    def read(self, start: int, count: int) -> np.ndarray:
        """Return count tokens from token start on, 1-D; the caller has checked that they exist."""

    def read_many(self, spans: typing.Iterable[tuple[int, int]]) -> list[np.ndarray]:
        """Return the tokens of several (start, count)."""
        return [self.read(start, count) for start, count in spans]


class MappedTokens(TokenSource):
    """Views of the mapped file.  A view keeps the mapping alive, even when this object is gone."""

    def __init__(self, path: str | os.PathLike, dtype: type) -> None:
        self.tokens = map_file(path).view(dtype)

    def read(self, start: int, count: int) -> np.ndarray:
        """Return a view: nothing is copied."""
        return self.tokens[start : start + count]


class FileTokens(TokenSource):
    """Reads from a file that stays open."""

    def __init__(self, path: str | os.PathLike, dtype: type) -> None:
        self.path = os.fspath(path)
        self.dtype = np.dtype(dtype)
        self._file = open(path, "rb", buffering=0)
        weakref.finalize(self, self._file.close)  # closes the file when this object is gone

    def read(self, start: int, count: int) -> np.ndarray:
        """Return a new array; DatasetFormatError if the file ends before the last token."""
        size = count * self.dtype.itemsize
        begin = start * self.dtype.itemsize
        content = _pread(self._file, size, begin)
        if len(content) < size:
            raise _format_error(self.path, f"bytes at {begin}", size, len(content))
        return np.frombuffer(content, self.dtype)


def _pread(file, size, begin):
    """The bytes of an open file from begin on: size bytes, or fewer at the end of the file.

    os.pread has no position that threads could mix up, and may return a part of what is there.
    """
    content = bytearray()
    while len(content) < size:
        got = os.pread(file.fileno(), size - len(content), begin + len(content))
        if not got:
            break
        content += got
    return content


class RemoteTokens(TokenSource):
    """Reads ranges of an object, or blocks of which the last few are kept."""

    _KEPT_BLOCKS = 8

    def __init__(self, url: str, dtype: type, block_bytes: int = 0) -> None:
        self.dtype = np.dtype(dtype)
        self.block_bytes = block_bytes
        self._file = RemoteFile(url)
        self._size = self._file.stamp()["size"] if block_bytes else None
        self._kept = {}  # {where a block begins: its bytes}, the oldest first

    def read(self, start: int, count: int) -> np.ndarray:
        """Return a new array; an error of the storage is an OSError that names the object."""
        return self.read_many([(start, count)])[0]

    def read_many(self, spans: typing.Iterable[tuple[int, int]]) -> list[np.ndarray]:
        """Return new arrays, whose ranges are fetched at the same time."""
        ranges = []
        for start, count in spans:
            begin = start * self.dtype.itemsize
            ranges.append((begin, begin + count * self.dtype.itemsize))
        if not self.block_bytes:
            contents = self._file.read_ranges(ranges)
        else:
            contents = []
            # A few ranges at a time, because the blocks of a whole batch may not fit into memory.
            for low in range(0, len(ranges), self._KEPT_BLOCKS):
                contents += self._read_from_blocks(ranges[low : low + self._KEPT_BLOCKS])
        return [np.frombuffer(content, self.dtype) for content in contents]

    def _read_from_blocks(self, ranges):
        """The bytes of each range, cut out of whole blocks."""
        blocks = self._kept.copy()  # a copy of this call's own, since threads may read, too
        missing = []  # (begin, end) of each block to fetch
        for begin, end in ranges:
            first = begin - begin % self.block_bytes
            for block in range(first, end, self.block_bytes):
                if block not in blocks:
                    missing.append((block, min(block + self.block_bytes, self._size)))
        fetched = self._file.read_ranges(missing)
        for (block, _), content in zip(missing, fetched, strict=True):
            blocks[block] = content
        self._kept = dict(list(blocks.items())[-self._KEPT_BLOCKS :])
        contents = []
        for begin, end in ranges:
            first = begin - begin % self.block_bytes
            parts = [blocks[block] for block in range(first, end, self.block_bytes)]
            contents.append(b"".join(parts)[begin - first : end - first])
        return contents


def open_tokens(
    path: str, dtype: type, mmap: bool = True, config: ObjectStorageConfig | None = None
) -> TokenSource:
    """Return the source of the tokens of a .bin file, which is mapped, open, or remote."""
    if is_remote(path):
        return RemoteTokens(path, dtype, 0 if config is None else config.bin_chunk_nbytes)
    return MappedTokens(path, dtype) if mmap else FileTokens(path, dtype)


def is_remote(path: str | os.PathLike) -> bool:
    """Return True for a name such as s3://bucket/corpus, and False for a path.

    >>> is_remote("s3://bucket/corpus.idx"), is_remote("data/corpus.idx")
    (True, False)
    """
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", os.fspath(path)) is not None


def file_stamp(path: str | os.PathLike) -> dict:
    """Return what tells a file from one that is written later: its size, its last change, ..."""
    if is_remote(path):
        return RemoteFile(path).stamp()
    stat = os.stat(path)
    return {"size": stat.st_size, "changed": stat.st_mtime_ns, "inode": stat.st_ino}


def file_exists(path: str | os.PathLike) -> bool:
    """Return True if there is such a file or object."""
    if not is_remote(path):
        return os.path.exists(path)
    try:
        RemoteFile(path).stamp()
    except FileNotFoundError:
        return False
    return True


def fetch_index(path: str, stamp: dict, config: ObjectStorageConfig | None = None) -> str:
    """Return the path of a local copy of an .idx file; a local file is its own copy.

    The name of the copy says which object it is of, and which state of it: so no two prefixes share
    a copy, and an object that has changed is copied again.  Processes that start together wait for
    the one that copies.
    """
    if not is_remote(path):
        return path
    folder = ObjectStorageConfig().folder if config is None else config.folder
    copied = os.path.join(folder, f"{_md5(path)}-{stamp['changed']}.idx")
    if os.path.exists(copied):
        return copied
    os.makedirs(folder, exist_ok=True)
    with open(f"{copied}.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the end of this block, or of this process, unlocks
        if not os.path.exists(copied):
            with NewFile(copied) as file:
                _copy_object(path, stamp, file)
    return copied


def _copy_object(url, stamp, file):
    """Write an object to an open file; OSError if the object changed meanwhile."""
    remote = RemoteFile(url)
    for block in remote.blocks(stamp["size"]):
        file.write(block)
    if remote.stamp() != stamp:
        raise OSError(f"{hide_credentials(url)} changed while it was copied: try again")


class RemoteFile:
    """An object on object storage, by its URL.

    Faults that pass, such as timeouts, server errors and replies that are cut short, are tried
    again after growing pauses; what is permanent, such as a missing object or a missing right, is
    raised at once.  An error is an OSError that names the object; user names, passwords and the
    queries of URLs are left out of its text.  Objects can be pickled, and used by threads and by
    forked processes: only the URL is kept, and fsspec keeps one connection for each process.
    """

    _PAUSES = (0.1, 0.3, 1, 3)  # seconds before each further try
    _BLOCK = 64 << 20  # bytes that are asked for at once where a whole object is read

    def __init__(self, url: str | os.PathLike) -> None:
        self.url = os.fspath(url)
        if self.url.lower().startswith("file://"):
            raise ValueError(f"{self.url}: for a local file give its path, without file://")

    def stamp(self) -> dict:
        """Return {"size": bytes, "changed": a digest of what the storage says of the object}."""
        found = self._try(self._info)
        if found.get("size") is None:
            raise OSError(f"{hide_credentials(self.url)}: the server does not tell its size")
        # The URL that a server redirects to may have a signature, which is a new one each time;
        # other servers tell when the object was last read.
        for name in ("url", "time", "accessTime"):
            found.pop(name, None)
        return {"size": found["size"], "changed": _md5(json.dumps(found, default=str))}

    def read_ranges(self, ranges: typing.Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes from begin to end of each (begin, end), fetched at the same time.

        A further try asks only for the ranges that did not come yet.
        """
        contents = {}  # {(begin, end): bytes}; each try adds what it gets
        for begin, end in ranges:
            if begin == end:
                contents[begin, end] = b""
        self._try(self._fetch_missing, ranges, contents)
        return [contents[span] for span in ranges]

    def blocks(self, size: int) -> typing.Iterator[bytes]:
        """Yield the whole object, which has this size, block by block."""
        for begin in range(0, size, self._BLOCK):
            yield self.read_ranges([(begin, min(begin + self._BLOCK, size))])[0]

    def upload(self, path: str) -> None:
        """Write a local file as this object, as a whole."""
        self._try(self._put, path)

    def remove(self) -> None:
        """Remove the object, if there is one."""
        with contextlib.suppress(FileNotFoundError):
            self._try(self._remove)

    def file_system(self) -> tuple[typing.Any, str]:
        """Return fsspec's file system, and the path of the object in it."""
        return self._try(self._open)

    def _open(self):
        """fsspec's file system, and the path of the object in it; fsspec keeps file systems."""
        import fsspec

        return fsspec.core.url_to_fs(self.url)

    def _info(self):
        """All that the storage says of the object, which must not be an older answer."""
        file_system, path = self._open()
        file_system.invalidate_cache(path)
        found = file_system.info(path)
        if found.get("type") == "directory":
            raise FileNotFoundError("this is a folder")
        return dict(sorted(found.items()))

    def _fetch_missing(self, ranges, contents):
        """Fetch the ranges that contents lacks; what came is kept, and the first error raised."""
        file_system, path = self._open()
        missing = [span for span in dict.fromkeys(ranges) if span not in contents]
        if not missing:
            return
        begins = [begin for begin, _ in missing]
        ends = [end for _, end in missing]
        paths = [path] * len(missing)
        found = file_system.cat_ranges(paths, begins, ends, on_error="return")
        errors = []
        for (begin, end), content in zip(missing, found, strict=True):
            if isinstance(content, BaseException):
                errors.append(content)
            elif len(content) > end - begin:  # such a server would send the whole object each time
                raise ValueError("the server sends more than the range that it is asked for")
            elif len(content) != end - begin:
                errors.append(OSError(f"bytes {begin} to {end} came as {len(content)} bytes"))
            else:
                contents[begin, end] = content
        if errors:
            raise errors[0]

    def _put(self, path):
        """Write a local file as this object."""
        file_system, remote_path = self._open()
        file_system.put_file(path, remote_path)

    def _remove(self):
        """Remove the object."""
        file_system, path = self._open()
        file_system.rm_file(path)

    def _try(self, operation, *arguments):
        """Call operation until it succeeds, as often as there are pauses, and once more."""
        num_tries = len(self._PAUSES) + 1
        for attempt in range(num_tries):
            try:
                return operation(*arguments)
            except Exception as error:
                fault = _cause_of(error)
                if attempt == num_tries - 1 or _is_permanent(fault):
                    # not "from error": the text of that error may hold credentials
                    raise self._describe(fault) from None
            time.sleep(self._PAUSES[attempt])

    def _describe(self, error):
        """The error to raise for one of fsspec's or of the libraries that it calls."""
        url = hide_credentials(self.url)
        text = hide_credentials(f"{type(error).__name__}: {error}")
        if isinstance(error, ImportError):
            return ImportError(
                f"{url} needs a further package: {error} (for s3, http and https: "
                'pip install "megatron-min[storage]")'
            )
        if getattr(error, "status", None) in (401, 403):
            return PermissionError(f"{url}: {text}")
        if isinstance(error, FileNotFoundError):
            # the text is often just the URL, with its query
            return FileNotFoundError(f"{url}: no such object, or no right to see it")
        if isinstance(error, PermissionError):
            return PermissionError(f"{url}: {text}")
        return OSError(f"{url}: {text}")


def _cause_of(error):
    """The cause of an error: fsspec calls whatever happens to an HTTP request "not found"."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return error
    is_of_http = type(cause).__module__.startswith("aiohttp")
    if is_of_http and getattr(cause, "status", None) != 404:
        return cause
    return error


def _is_permanent(error):
    """Would a request fail again in the same way?

    Each library has classes of its own for a connection that broke, so the rest counts as passing.
    """
    status = getattr(error, "status", None)  # of HTTP
    if isinstance(status, int) and 400 <= status < 500:
        return status not in (408, 429)  # a timeout, and too many requests
    if "Credentials" in type(error).__name__:
        return True
    names = f"{type(error).__name__} {type(error.__cause__).__name__}"
    if "SSL" in names:  # whose errno is a number of OpenSSL's, even where aiohttp wraps the error
        return "SSLCertVerificationError" in names
    if getattr(error, "errno", None) in _PERMANENT_ERRNOS:
        return True
    return isinstance(error, _PERMANENT_ERRORS)


_PERMANENT_ERRNOS = (errno.EINVAL, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG, errno.EMSGSIZE)
_PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    ImportError,
    LookupError,
    TypeError,
    ValueError,
    RuntimeError,
)


def hide_credentials(text: str | os.PathLike) -> str:
    """Return a text without the user names and passwords, and without the queries, of its URLs.

    >>> hide_credentials("https://me:secret@host/corpus?X-Amz-Signature=12ab: no such object")
    'https://host/corpus no such object'
    """
    # A password may contain a /, as in s3://key:pass/word@bucket; host:8080/a@b has no password.
    users = r"://([^/\s]*|[^/\s:]+:(?!\d+/)[^\s@'\"]*)@"
    without_users = re.sub(users, "://", os.fspath(text))
    return re.sub(r"(://[^\s?'\"]*)\?[^\s'\"]*", r"\1", without_users)


# ==============================================================================
# 14. Batches ahead
# ==============================================================================
# Question answered here: how is the next batch ready before it is asked for?
#
#   sampler       0 1 2 3 4 ...        indices of each batch
#   threads             2 3            num_workers of them make batches ahead
#   training loop   1                  uses the batch that is ready
#
# Threads serve for our own datasets, where C makes the batches: C runs without Python's lock, so
# the loop is not held up.  Any other dataset is read by torch's DataLoader, with num_workers
# processes.  With num_workers=0 a batch is made when the loop asks for it.  (A thread for that case
# would be slower: to hand over a batch of 8 samples of 2,048 tokens takes as long as to make it.)
#
# The sampler runs ahead of the training loop.  A saved position counts the batches that the loop
# was given, so what was made ahead and not used is made again after a resume.


class PretrainingDataLoader(torch.utils.data.DataLoader):
    """A DataLoader whose position can be saved, as with torchdata's StatefulDataLoader.

    dataset        any dataset
    batch_sampler  a sampler of section 8
    num_workers    how many threads, or processes, make batches ahead; 0: none
    arguments      further arguments of DataLoader, such as collate_fn or prefetch_factor.  With
                   one of these the batches of our own datasets, too, are made by DataLoader and
                   its processes; pin_memory alone does not change who makes them.

    >>> loader = PretrainingDataLoader(range(6), MegatronPretrainingSampler(6, 0, 2, 0, 1))
    >>> state = [loader.state_dict() for batch in loader][0]          # after the first batch
    >>> again = PretrainingDataLoader(range(6), MegatronPretrainingSampler(6, 0, 2, 0, 1))
    >>> again.load_state_dict(state)
    >>> list(again)
    [tensor([2, 3]), tensor([4, 5])]
    """

    def __init__(
        self,
        dataset: typing.Any,
        batch_sampler: _Sampler,
        num_workers: int = 0,
        **arguments: typing.Any,
    ) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers must be >= 0, got {num_workers}")
        self.makes_batches = releases_the_gil(dataset) and arguments.keys() <= {"pin_memory"}
        self.num_threads = 0
        if self.makes_batches:
            self.num_threads = num_workers
            num_workers = 0  # torch starts no processes
        arguments.setdefault("persistent_workers", num_workers > 0)
        super().__init__(dataset, batch_sampler=batch_sampler, num_workers=num_workers, **arguments)
        self.consumed_samples = batch_sampler.consumed_samples
        self._num_loads = 0  # a running iterator sees by it that a state was loaded

    def __iter__(self) -> typing.Iterator[dict]:
        sampler = self.batch_sampler
        limit = sampler.total_samples
        if sampler.kind == "cyclic":
            # This sampler advances its own number as it runs ahead of the loop: set it back to the
            # last batch that the loop was given.  The others start each further pass at 0.
            sampler.consumed_samples = self.consumed_samples
            limit = math.inf  # it counts on over all epochs
        consumed = sampler.consumed_samples
        num_loads = self._num_loads
        batches = self._own_batches() if self.makes_batches else super().__iter__()
        for batch in batches:
            consumed += sampler.samples_per_round
            self.consumed_samples = min(consumed, limit)
            yield batch
            if self._num_loads != num_loads:
                raise RuntimeError(
                    "load_state_dict() was called while this iterator was running: it would go on "
                    "at its old place, so start a new one with iter(loader)"
                )

    def _own_batches(self):
        """Batches of our own datasets, in the order of the sampler."""
        if not self.num_threads:
            return map(self._make_batch, self.batch_sampler)
        pool = concurrent.futures.ThreadPoolExecutor(self.num_threads)
        return map_ahead(pool, self.num_threads + 1, self._make_batch, self.batch_sampler)

    def _make_batch(self, indices):
        """One batch; where there is a GPU, in pinned memory, from which it copies faster."""
        batch = self.dataset.batch(indices)
        if self.pin_memory and torch.cuda.is_available():
            batch = {key: values.pin_memory() for key, values in batch.items()}
        return batch

    def state_dict(self) -> dict:
        """Return a small JSON-able dict: how far, in which order, of what.

        It is equal on all ranks that read: a tensor-parallel rank that gets its batches from
        another one stays at the beginning.
        """
        return save_position(self.dataset, self.batch_sampler, self.consumed_samples)

    def load_state_dict(self, state: dict, strict: bool = True) -> None:
        """Go on where the state was taken, in the next iterator: one that runs raises RuntimeError.

        Ranks, micro-batch size and workers may be others, unless the order depends on them.  With
        stable_order the run may be longer, or its later phases others.
        ValueError names what does not fit; strict=False goes on all the same.
        """
        consumed = check_position(state, self.dataset, self.batch_sampler, strict)
        self._num_loads += 1
        self.consumed_samples = consumed
        self.batch_sampler.consumed_samples = consumed


def map_ahead(
    pool: concurrent.futures.Executor,
    limit: int,
    function: typing.Callable,
    items: typing.Iterable,
) -> typing.Iterator:
    """Yield function(item) for each item, in order, made in a pool at most limit items ahead.

    So memory stays small however many items there are.  The pool ends with the iterator.  An error
    of function comes in the place of its result, and an error of items after all results.

    >>> pool = concurrent.futures.ThreadPoolExecutor(2)
    >>> list(map_ahead(pool, 2, len, ["aaaa", "bbb", "cccccc"]))
    [4, 3, 6]
    """
    pending = collections.deque()
    try:
        for future in _submit_all(pool, function, items):
            pending.append(future)
            if len(pending) > limit:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        # no waiting: the garbage collector may close this iterator in any thread at any time
        pool.shutdown(wait=False, cancel_futures=True)


def _submit_all(pool, function, items):
    """Yield a future of function(item) for each item; after an error of items, one that failed."""
    try:
        for item in items:
            yield pool.submit(function, item)
    except Exception as error:
        failed = concurrent.futures.Future()
        failed.set_exception(error)
        yield failed


def build_pretraining_data_loader(
    dataset: typing.Any,
    consumed_samples: int,
    *,
    micro_batch_size: int,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    dataloader_type: str = "single",
    data_sharding: bool = True,
    num_workers: int = 0,
    full_validation: bool = False,
    drop_last: bool = True,
    seed: int = 0,
) -> typing.Any:
    """Return a PretrainingDataLoader of this rank's micro-batches; None for None.

    A micro-batch is a dict of tensors (micro_batch_size, ...).  Upstream:
    build_pretraining_data_loader.

    dataloader_type   "single": in order; "cyclic": shuffled anew each epoch; "external": dataset
                      is a loader already, and is returned as it is
    data_sharding     of cyclic: each rank shuffles a part of its own
    num_workers       as of PretrainingDataLoader
    full_validation   every sample once, one for each rank and round
    drop_last         of single: leave out the last samples, which fill no whole round
    seed              of cyclic

    >>> loader = build_pretraining_data_loader(range(8), 0, micro_batch_size=2)
    >>> next(iter(loader)), loader.state_dict()["consumed_samples"]
    (tensor([0, 1]), 2)
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    layout = {
        "total_samples": len(dataset),
        "consumed_samples": consumed_samples,
        "micro_batch_size": micro_batch_size,
        "data_parallel_rank": data_parallel_rank,
        "data_parallel_size": data_parallel_size,
    }
    if full_validation:
        sampler = MegatronFullValidationSampler(**layout)
    elif dataloader_type == "single":
        sampler = MegatronPretrainingSampler(**layout, drop_last=drop_last)
    elif dataloader_type == "cyclic":
        sampler = MegatronPretrainingRandomSampler(
            dataset, **layout, data_sharding=data_sharding, seed=seed
        )
    else:
        raise ValueError(
            f"dataloader_type must be single, cyclic or external, got {dataloader_type!r}"
        )
    return PretrainingDataLoader(
        dataset, sampler, num_workers, pin_memory=torch.cuda.is_available()
    )


# ==============================================================================
# 15. One error for every rank
# ==============================================================================
# Question answered here: what do the other ranks do when one rank fails?
#
#   Without this section the others would wait for the failed rank in the next collective, until a
#   timeout ends them, and none of their logs would say why.
#
#            step()             smallest of all     rank 2 broadcasts    every rank raises
#   rank 0   works     -> 4 --+                   +-- class and sentence --> "rank 2: no such file"
#   rank 1   works     -> 4 --+--> all_reduce     +------------------------> "rank 2: no such file"
#   rank 2   raises    -> 2 --+     gives 2       +------------------------> "rank 2: no such file"
#   rank 3   works     -> 4 --+                   +------------------------> "rank 2: no such file"
#
# A rank that works gives the number of ranks; a rank that fails gives its own number.  If all work,
# the smallest is the number of ranks, and nothing more is sent.  A process that dies takes part in
# nothing: its launcher (torchrun) stops the others and names it.

_MESSAGE_BYTES = 8192  # holds a class name and a sentence, however many bytes its characters take
_MESSAGE_CHARACTERS = 600

# The classes that reach other ranks as themselves; an error of any other class becomes a
# RuntimeError whose sentence has the name of that class behind "rank R: ".
_SHARED_ERRORS = {
    kind.__name__: kind
    for kind in (
        DatasetFormatError,
        BlendTooLarge,
        FileNotFoundError,
        ImportError,
        IndexError,
        KeyError,
        OSError,
        PermissionError,
        RuntimeError,
        StopIteration,
        TypeError,
        ValueError,
    )
}


def _is_distributed() -> bool:
    """Whether this process is a rank of a torch.distributed job."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank(group=None) -> int:
    """This process's rank in the group, by default of the whole job; 0 without a job."""
    if not _is_distributed():
        return 0
    return torch.distributed.get_rank(group)


def _device_of_group(group=None) -> torch.device:
    """The device on which a tensor must be so that the group can send it."""
    if _is_distributed() and torch.distributed.get_backend(group) == "nccl":
        return torch.device("cuda")
    return torch.device("cpu")


def on_every_rank(step: typing.Callable[[], typing.Any], group: typing.Any = None) -> typing.Any:
    """Call step() on every rank of a group; if it fails on one rank, it fails on every rank.

    step     is called without arguments; it may use collectives only if all ranks reach them
    group    a torch.distributed process group; None: all ranks
    Returns  what step() returns on this rank
    Raises   where step() failed on several ranks, the error of the lowest of them, on every rank.
             Its sentence begins with "rank R: ", R being the rank in the whole job, and is cut to
             600 characters; its class is the original one if that is a common one, else
             RuntimeError.  A rank that failed itself has its own error as the cause.  Without
             other ranks the error of step() is passed on as it is.
    Cost     one all_reduce of 8 bytes; another 8 KiB where a rank failed

    >>> on_every_rank(os.getpid) == os.getpid()
    True
    """
    if not _is_distributed() or torch.distributed.get_world_size(group) == 1:
        return step()
    result = None
    error = None
    try:
        result = step()
    except Exception as caught:
        error = caught
    world = torch.distributed.get_world_size(group)
    mine = world
    if error is not None:
        mine = _rank(group)
    first_failed = torch.tensor(mine, device=_device_of_group(group))
    torch.distributed.all_reduce(first_failed, torch.distributed.ReduceOp.MIN, group=group)
    if first_failed < world:
        _raise_error_of(int(first_failed), error, group)
    return result


def _raise_error_of(source, error, group):
    """Raise the error of the group's rank number `source` on every rank of the group.

    Every rank must call this function with its own error, or with None if it has none.
    """
    message = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    if _rank(group) == source:
        message = _encode_error(error)
    message = message.to(_device_of_group(group))
    torch.distributed.broadcast(message, group=group, group_src=source)
    name, sentence = json.loads(bytes(message.tolist()))
    shared = _SHARED_ERRORS[name](sentence)
    shared.names_its_rank = True
    raise shared from error


def _encode_error(error):
    """The class name and the sentence of an error, as JSON in a uint8 tensor of fixed size."""
    sentence = str(error)
    if isinstance(error, KeyError) and error.args:
        sentence = str(error.args[0])  # str(error) puts quotes around the sentence
    name = type(error).__name__
    if _SHARED_ERRORS.get(name) is not type(error):
        sentence = f"{name}: {sentence}"
        name = "RuntimeError"
    if not hasattr(error, "names_its_rank"):  # it may have come through on_every_rank() before
        sentence = f"rank {_rank()}: {sentence}"
    # JSON in ASCII: a character takes at most 12 bytes, so 600 of them always fit.  No pickle:
    # unpickling would run whatever code the message asks for.
    text = json.dumps([name, sentence[:_MESSAGE_CHARACTERS]])
    padded = text.encode("ascii").ljust(_MESSAGE_BYTES)
    return torch.tensor(list(padded), dtype=torch.uint8)


def check_data_consistency(consumed_samples: int, group: typing.Any = None) -> None:
    """Check that all ranks of a group go on from the same number of consumed samples.

    consumed_samples  of this rank, in samples; typically from a checkpoint
    group             a torch.distributed process group; None: all ranks
    Raises            ValueError, on every rank, where the ranks disagree
    Cost              two all_reduce of 8 bytes; nothing without torch.distributed
    """
    if not _is_distributed():
        return
    least = torch.tensor(int(consumed_samples), device=_device_of_group(group))
    most = least.clone()
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, group=group)
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX, group=group)
    if least != most:
        raise ValueError(
            f"consumed_samples differs between ranks, from {int(least)} to {int(most)} (rank "
            f"{_rank()} has {int(consumed_samples)}): load the same checkpoint on every rank"
        )


# ==============================================================================
# 16. The C kernels
# ==============================================================================
# Question answered here: where is each loop made fast, and how is C switched on and off?
#
#   definition, in part I               adapter, below                 loop, in _helpers.c
#   _encode_tokens                      _c_encode_tokens               encode_tokens
#   IndexedDataset.verify               _c_verify                      verify_index
#   build_sample_idx                    _c_build_sample_idx            build_sample_idx
#   shuffle                             _c_shuffle                     shuffle
#   build_blending_indices              _c_build_blending_indices      build_blending_indices
#   build_exhaustive_blending_indices   _c_build_exhaustive_...        build_exhaustive_...
#   GPTDataset.__getitem__, batch       _c_getitem, _c_batch           read_samples
#   BlendedDataset.batch                _c_blended_batch               read_samples
#
# An adapter takes the arguments of its definition and gives the same result.  functools.wraps()
# gives it the docstring of the definition, and keeps the definition as adapter.__wrapped__.  A loop
# that finds a place it cannot trust stops and says so; then the definition runs, and raises the
# error with its sentence.
#
# _helpers.c is built as the extension module _megatron_min.  MEGATRON_MIN_C=0 leaves the module
# out, =1 makes it an error that it cannot be imported, unset takes it if it is there.

IMPLEMENTATION = "python"
if os.environ.get("MEGATRON_MIN_C") != "0":
    try:
        import _megatron_min

        IMPLEMENTATION = "c"
    except ImportError as error:
        if os.environ.get("MEGATRON_MIN_C") == "1":
            sentence = (
                f"MEGATRON_MIN_C=1 asks for the C kernels: {error}.  Build them (pip install . in "
                "a clone of megatron_min), or unset MEGATRON_MIN_C"
            )
            if __name__ == "__main__":
                sys.exit(sentence)
            raise ImportError(sentence) from error
        if not isinstance(error, ModuleNotFoundError):
            warnings.warn(f"the C kernels are there, and cannot be loaded: {error}", stacklevel=2)

_MANY_ENTRIES = 1_000_000  # of an index: to build more of them in Python is a wait
_has_warned_of_python = False


def _warn_if_python_is_slow(num_entries):
    """Warn, once in a process, where Python builds an index so large that C would be missed."""
    global _has_warned_of_python
    if IMPLEMENTATION == "c" or num_entries <= _MANY_ENTRIES or _has_warned_of_python:
        return
    _has_warned_of_python = True
    warnings.warn(
        f"an index of {num_entries:,} entries is built in Python, for the C kernels are not there: "
        "they are 5 to 100 times faster (pip install . in a clone of megatron_min builds them)",
        stacklevel=2,
    )


@functools.wraps(_encode_tokens)
def _c_encode_tokens(values, dtype):
    if not isinstance(values, (list, np.ndarray)):
        values = _as_array(values, dtype)
    try:
        return _megatron_min.encode_tokens(values, dtype.kind, dtype.itemsize)
    except (TypeError, ValueError):
        return _c_encode_tokens.__wrapped__(values, dtype)


@functools.wraps(IndexedDataset.verify)
def _c_verify(self):
    if not self._verified:
        arrays = self.sequence_lengths, self.sequence_pointers, self.document_indices
        self._verified = _megatron_min.verify_index(*arrays, self._token_bytes)
    _c_verify.__wrapped__(self)  # it does nothing more, or raises the error


_DOCUMENTS_OF_A_THREAD = 1 << 22  # fewer documents are not worth a thread of their own


@functools.wraps(build_sample_idx)
def _c_build_sample_idx(
    sizes,
    document_indices,
    sequence_length,
    num_epochs,
    tokens_per_epoch,
    drop_last_partial_sequence=True,
    add_extra_token_to_sequence=True,
):
    arguments = sizes, document_indices, sequence_length, num_epochs, tokens_per_epoch
    flags = drop_last_partial_sequence, int(add_extra_token_to_sequence)
    num_samples, tokens_needed = _measure_stream(*arguments, *flags)
    S = operator.index(sequence_length)
    x = int(add_extra_token_to_sequence)
    sizes = np.ascontiguousarray(sizes)
    documents = np.ascontiguousarray(document_indices)
    rows = np.empty((num_samples + 1, 2), _sample_index_dtype(len(documents)))
    try:
        _c_fill_sample_index(rows, sizes, documents, S, x, tokens_needed)
    except (IndexError, ValueError):
        return _c_build_sample_idx.__wrapped__(*arguments, *flags)
    if tokens_needed < num_samples * S and not x:
        rows[-1] = _end_of_stream(sizes, documents)
    return rows


def _c_fill_sample_index(rows, sizes, documents, S, x, tokens_needed):
    """Fill the sample index, a part of the documents on each core.

    Row k comes from the document in which k*S + x tokens have been read; for the last row these are
    tokens_needed.  A part fills the rows whose number of tokens is reached in its documents.

    documents   | part 0               | part 1              |
    tokens      0 .................... before[1] ........... the end
    rows        k*S + x <= before[1]   the others

    In C, build_sample_idx(rows, sizes, documents, S, x, last, low, begin, before) fills rows, which
    are those of the index from row low on, from documents, which are those of the stream from place
    begin on.  There are before tokens before these, and last is the number of tokens of the last of
    these rows.  The call returns the number of tokens up to the end of these documents.
    """
    parts = _cut_documents(documents)
    if len(parts) == 1:
        _megatron_min.build_sample_idx(rows, sizes, documents, S, x, tokens_needed)
        return
    with concurrent.futures.ThreadPoolExecutor(len(parts)) as pool:
        before = [0]  # tokens before each part
        for begin, end in parts[:-1]:
            before.append(before[-1] + _c_count_tokens(pool, sizes, documents[begin:end]))
        futures = []
        low = 0
        for part, (begin, end) in enumerate(parts):
            high = len(rows)
            if part + 1 < len(parts) and before[part + 1] < tokens_needed:
                # the first row that this part cannot reach; row 0, (0, 0), is always of part 0
                high = max(1, (before[part + 1] - x) // S + 1)
            last = min(tokens_needed, (high - 1) * S + x)
            place = low, begin, before[part]
            arguments = rows[low:high], sizes, documents[begin:end], S, x, last, *place
            futures.append(pool.submit(_megatron_min.build_sample_idx, *arguments))
            low = high
        for future in futures:
            future.result()


def _cut_documents(documents):
    """Parts of the documents, one for each core if they are many: [(begin, end), ...]."""
    most = 2**31 - 1  # documents that one call can number
    cores = _num_cores()
    count = max(1, min(cores, len(documents) // _DOCUMENTS_OF_A_THREAD))
    count = max(count, _ceil_div(len(documents), most))
    edges = [len(documents) * part // count for part in range(count + 1)]
    return list(zip(edges[:-1], edges[1:], strict=True))


def _num_cores():
    """The cores of this machine, or 1 if Python cannot tell."""
    cores = os.cpu_count()
    return 1 if cores is None else cores


def _c_count_tokens(pool, sizes, documents):
    """The tokens of these documents, counted on all cores: the loop, without rows to fill."""
    no_rows = np.empty((0, 2), np.int32)
    S = 1  # without rows to fill, S, x and the last row do not matter: the loop only counts
    futures = []
    for piece in np.array_split(documents, _num_cores()):
        arguments = no_rows, sizes, piece, S, 0, 0
        futures.append(pool.submit(_megatron_min.build_sample_idx, *arguments))
    return sum(future.result() for future in futures)


@functools.wraps(shuffle)
def _c_shuffle(items, random_state):
    if not _is_shuffled_by_c(items) or type(random_state) is not np.random.RandomState:
        random_state.shuffle(items)
        return
    state = random_state.get_state(legacy=False)  # a copy
    if state["bit_generator"] != "MT19937":
        random_state.shuffle(items)
        return
    generator = state["state"]
    generator["pos"] = _megatron_min.shuffle(items, generator["key"], generator["pos"])
    random_state.set_state(state)


def _is_shuffled_by_c(items):
    """Is this a plain 1-D array of a dtype that C knows?"""
    if type(items) is not np.ndarray or items.ndim != 1 or not items.flags.carray:
        return False
    return items.dtype in (np.int32, np.uint32, np.int64)


@functools.wraps(build_blending_indices)
def _c_build_blending_indices(
    dataset_index, dataset_sample_index, weights, num_datasets, size, verbose=False
):
    weights = np.array(weights[:num_datasets], np.float64)
    _check_blending(dataset_index, dataset_sample_index, weights, num_datasets, size)
    outputs = dataset_index, dataset_sample_index
    if not _are_filled_by_c(*outputs):
        return _c_build_blending_indices.__wrapped__(*outputs, weights, num_datasets, size)
    _megatron_min.build_blending_indices(*outputs, weights, num_datasets, size)


@functools.wraps(build_exhaustive_blending_indices)
def _c_build_exhaustive_blending_indices(dataset_index, dataset_sample_index, sizes, num_datasets):
    sizes = _as_counts(sizes, num_datasets)
    size = sum(sizes.tolist())
    _check_blending(dataset_index, dataset_sample_index, sizes, num_datasets, size)
    outputs = dataset_index, dataset_sample_index
    if not _are_filled_by_c(*outputs):
        return _c_build_exhaustive_blending_indices.__wrapped__(*outputs, sizes, num_datasets)
    _megatron_min.build_exhaustive_blending_indices(*outputs, sizes, num_datasets)


def _are_filled_by_c(dataset_index, dataset_sample_index):
    """Do the items lie side by side, in memory that may be written?"""
    return dataset_index.flags.carray and dataset_sample_index.flags.carray


# A batch is made in one pass over its tokens: C writes each sample into its row of the tensors.

_NO_EOD = -(2**63)  # an id that no token has
_ROW_0 = array.array("q", [0])  # where a single sample goes

# the methods of GPTDataset whose work C does; a subclass that has its own is left to the
# definitions
_METHODS_IN_C = (
    "__getitem__",
    "__getitems__",
    "pieces",
    "_part",
    "_query_document_sample_shuffle_indices",
    "_read_pieces",
    "_reads_many",
    "_join",
    "_make_sample",
    "_rows",
    "_pad",
    "_loss_mask",
    "_starts_after_eod",
    "_starts_of_pieces",
)


def _is_read_by_c(dataset):
    """Are the samples of this dataset those of GPTDataset, of a corpus that is mapped?"""
    if not isinstance(dataset, GPTDataset) or _has_methods_of_its_own(type(dataset)):
        return False
    corpus = dataset.dataset
    if type(corpus) is not IndexedDataset or corpus.multimodal:
        return False
    return corpus.is_mapped


def _has_methods_of_its_own(cls):
    """Does a subclass of GPTDataset replace a method whose work C does?"""
    if cls is GPTDataset:
        return False
    return any(getattr(cls, name) is not getattr(GPTDataset, name) for name in _METHODS_IN_C)


def releases_the_gil(dataset: typing.Any) -> bool:
    """Return True if C makes the batches of this dataset, so that threads can make them ahead.

    That is so for GPTDataset and its blends, where no subclass overrides how a sample is made.

    >>> releases_the_gil(range(3))
    False
    """
    if IMPLEMENTATION != "c":
        return False
    if isinstance(dataset, BlendedDataset):
        if type(dataset).batch is not BlendedDataset.batch or not _has_samples_of_a_blend(dataset):
            return False
        return all(_is_part_read_by_c(dataset, part) for part in dataset.datasets)
    return _is_read_by_c(dataset) and type(dataset).batch is GPTDataset.batch


def _has_samples_of_a_blend(dataset):
    """Are the samples of this dataset those of BlendedDataset?  A subclass may have its own."""
    cls = type(dataset)
    return (
        cls.__getitem__ is BlendedDataset.__getitem__
        and cls.__getitems__ is BlendedDataset.__getitems__
    )


def _is_part_read_by_c(blend, dataset):
    """May C write the samples of this dataset into the rows of a batch of the blend?"""
    return _is_read_by_c(dataset) and dataset.config is blend.config


def _c_columns(config, count):
    """Empty arrays for a batch of so many samples: {key: array (B, ...)}, in upstream's order."""
    S = config.sequence_length
    columns = {"tokens": np.empty((count, S), np.int64), "labels": np.empty((count, S), np.int64)}
    if config.has_dense_mask:
        columns["attention_mask"] = np.empty((count, 1, S, S), bool)
    columns["loss_mask"] = np.empty((count, S), np.float32)
    columns["position_ids"] = np.empty((count, S), np.int64)
    if config.inter_document_masking:
        columns["cu_seqlens"] = np.empty((count, S + 1), np.int32)
        columns["max_seqlen"] = np.empty(count, np.int32)
    return columns


def _c_fill(dataset, columns, rows, indices):
    """Write the samples of these indices (None: padding) into these rows of the columns.

    False if the loop met a place that it cannot trust.
    """
    wanted = [0 if k is None else k for k in indices]
    if not _c_read_samples(dataset, columns, array.array("q", rows), wanted):
        return False
    for row, k in zip(rows, indices, strict=True):
        if k is None:
            columns["loss_mask"][row] = 0
    return True


def _c_read_samples(dataset, columns, rows, wanted):
    """Call the loop: False if it met a place that it cannot trust."""
    config = dataset.config
    corpus = dataset.dataset
    shuffle_index = dataset.shuffle_index
    if len(dataset) < len(shuffle_index):  # of a subclass: no sample comes from behind its end
        shuffle_index = shuffle_index[: len(dataset)]
    try:
        pads = _megatron_min.read_samples(
            (
                columns["tokens"],
                columns["labels"],
                columns["loss_mask"],
                columns["position_ids"],
                columns.get("cu_seqlens"),
                columns.get("max_seqlen"),
                columns.get("attention_mask"),
            ),
            rows,
            array.array("q", wanted),
            (corpus._tokens.tokens, corpus.sequence_pointers, corpus.sequence_lengths),
            (dataset.document_index, dataset.sample_index, shuffle_index),
            (
                dataset._extra,
                dataset._pad_token_id,
                _NO_EOD if dataset._eod_token_id is None else dataset._eod_token_id,
                config.reset_position_ids,
                config.eod_mask_loss,
                config.reset_attention_mask,
            ),
        )
    except (OverflowError, TypeError, ValueError):
        return False  # no dataset has 2**63 samples; or an index array is none that a builder made
    if pads > 0:  # so many real tokens equal the pad id
        dataset._warn_of_real_pads()
    return pads >= 0


def _c_make_batch(dataset, indices):
    """A batch of one dataset, {key: array (B, ...)}; None where the definition has to make it."""
    if len(indices) == 0 or not _is_read_by_c(dataset):
        return None
    columns = _c_columns(dataset.config, len(indices))
    if not _c_fill(dataset, columns, range(len(indices)), indices):
        return None
    return columns


@functools.wraps(GPTDataset.__getitem__)
def _c_getitem(self, idx):
    if idx is None or not _is_read_by_c(self):
        return _c_getitem.__wrapped__(self, idx)
    columns = _c_columns(self.config, 1)
    if not _c_read_samples(self, columns, _ROW_0, [idx]):
        return _c_getitem.__wrapped__(self, idx)
    return _c_sample(columns, 0)


@functools.wraps(GPTDataset.__getitems__)
def _c_getitems(self, indices):
    columns = _c_make_batch(self, indices)
    if columns is None:
        return _c_getitems.__wrapped__(self, indices)
    return [_c_sample(columns, row) for row in range(len(indices))]


def _c_sample(columns, row):
    """One row of a batch, as tensors that share no memory with those of other rows.

    values[row, ...] of the 1-D max_seqlen is an array without axes; values[row] would be a number.
    """
    return {key: torch.from_numpy(values[row, ...]) for key, values in columns.items()}


@functools.wraps(MegatronDataset.batch)
def _c_batch(self, indices):
    columns = _c_make_batch(self, indices)
    if columns is None:
        return _c_batch.__wrapped__(self, indices)
    return {key: torch.from_numpy(values) for key, values in columns.items()}


@functools.wraps(BlendedDataset.batch)
def _c_blended_batch(self, indices):
    if len(indices) == 0:
        return _c_blended_batch.__wrapped__(self, indices)
    if not _has_samples_of_a_blend(self):
        return _c_blended_batch.__wrapped__(self, indices)
    columns = {"dataset_id": np.empty(len(indices), np.int16)}
    columns |= _c_columns(self.config, len(indices))
    for d, (rows, wanted) in self._rows_by_dataset(indices).items():
        dataset = self.datasets[d]
        if not _is_part_read_by_c(self, dataset) or not _c_fill(dataset, columns, rows, wanted):
            return _c_blended_batch.__wrapped__(self, indices)
        columns["dataset_id"][rows] = d
    return {key: torch.from_numpy(values) for key, values in columns.items()}


if IMPLEMENTATION == "c":
    _encode_tokens = _c_encode_tokens
    IndexedDataset.verify = _c_verify
    build_sample_idx = _c_build_sample_idx
    shuffle = _c_shuffle
    build_blending_indices = _c_build_blending_indices
    build_exhaustive_blending_indices = _c_build_exhaustive_blending_indices
    GPTDataset.__getitem__ = _c_getitem
    GPTDataset.__getitems__ = _c_getitems
    GPTDataset.batch = _c_batch
    BlendedDataset.batch = _c_blended_batch


def _describe_kernels():
    """Return which kernels run, and why those of C do not; pip hides what a build says."""
    if IMPLEMENTATION == "c":
        return "kernels: c"
    if os.environ.get("MEGATRON_MIN_C") == "0":
        return "kernels: python, for MEGATRON_MIN_C=0"
    return (
        "kernels: python, for the C extension was not built or cannot be loaded; "
        "reinstall with MEGATRON_MIN_C=1 to see why"
    )


# ==============================================================================
# PART III: THE TOOLS
# ==============================================================================
#
# ==============================================================================
# 17. Tokenizers
# ==============================================================================
# Question answered here: which tokenizers can a command use?
#
# A command names its tokenizer; build_tokenizer() turns the name into an object.
#
#   bytes               ByteTokenizer(), of section 2
#   null:50000          NullTokenizer(50000): the text holds ids already
#   tokenizer.json      HuggingFaceTokenizer("tokenizer.json"); or a folder that holds such a file
#   my_module:thing     what a module of your own has under this name: a tokenizer, or a class or
#                       function that makes one without arguments
#
# A tokenizer may have one method more than section 2 asks for: tokenize_batch(texts) returns the
# ids of each text, as a list of lists or arrays, or as an array of the package awkward.  It is used
# where it exists, because a library can be faster on many texts.


class NullTokenizer:
    """Ids written as numbers, with spaces in between; eod is the number after the last id.

    vocab_size   argument: how many ids there are, without eod; the attribute of this name, as in
                 every tokenizer, counts eod too: one more
    Raises       ValueError if vocab_size is not a whole number
    Upstream     NullTokenizer

    >>> tokenizer = NullTokenizer(100)
    >>> tokenizer.tokenize("7 0 99"), tokenizer.eod
    ([7, 0, 99], 100)
    """

    def __init__(self, vocab_size: int | str) -> None:
        if not str(vocab_size).isdecimal():
            raise ValueError(
                f"null:VOCAB wants a number of ids, such as null:50000, got {vocab_size!r}"
            )
        self.eod = int(vocab_size)
        self.vocab_size = self.eod + 1
        self.unique_identifiers = {"class": "NullTokenizer", "vocab_size": self.vocab_size}

    def tokenize(self, text: str) -> list[int]:
        """Return the numbers in a text; ValueError if a word is no number."""
        return [int(number) for number in text.split()]

    def tokenize_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Return the numbers in each text as an array."""
        return [np.array(text.split(), np.int64) for text in texts]

    def detokenize(self, ids: typing.Iterable[int]) -> str:
        """Return ids as numbers with spaces in between."""
        return " ".join(str(token) for token in ids)


class HuggingFaceTokenizer:
    """A tokenizer.json, whose ids the package tokenizers defines (pip install tokenizers).

    path                the tokenizer.json, or a folder that holds it, as save_pretrained() makes it
    eod_token           the text of the end-of-document token; default <|endoftext|>, or else </s>
    add_special_tokens  let the file's post-processor put its special tokens, such as the beginning
                        of a text (BOS), around each text; with False a text is its own tokens
                        alone, as in upstream's preprocessing
    Raises              FileNotFoundError; ImportError without the package; ValueError if the file
                        is no tokenizer, or has no such token

    The package gigatoken makes the same ids forty times faster.  tokenize_batch() uses it after
    choose_engine() has found that it can be trusted.
    """

    # gigatoken 0.10 keeps each word that it has seen, in about 11 bytes for each byte of it.  So it
    # is made anew after so much text: that costs 7 % of the time, and a worker stays below 1 GiB.
    _GIGATOKEN_BYTES = 48 << 20

    def __init__(
        self,
        path: str | os.PathLike,
        eod_token: str | None = None,
        add_special_tokens: bool = False,
    ) -> None:
        path = os.fspath(path)
        if os.path.isdir(path):
            path = os.path.join(path, "tokenizer.json")
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{path}: no such file")
        tokenizers = _import_extra("tokenizers", "tools", path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(path)
        except Exception as error:  # the package raises nothing more special
            raise ValueError(
                f"{path}: wanted a tokenizer.json of the package tokenizers: {error}"
            ) from None
        self.path = path
        self._add_special_tokens = add_special_tokens
        self._uses_gigatoken = False
        self._gigatoken = None  # made when it is first used, and anew after much text
        self._gigatoken_bytes = 0  # how much text it has seen
        self.vocab_size = self._tokenizer.get_vocab_size()
        self.eod = self._find_eod(path, eod_token)
        self.unique_identifiers = {
            "class": "HuggingFaceTokenizer",
            "tokenizer.json": _md5(self._tokenizer.to_str()),
            "eod": self.eod,
        }
        if add_special_tokens:
            self.unique_identifiers["add_special_tokens"] = True
        # A file may say that long texts are cut off, and short ones filled up: not in a corpus.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def _find_eod(self, path, eod_token):
        """Return the id of eod_token, or of the first usual name that the vocabulary has."""
        names = ["<|endoftext|>", "</s>"]
        if eod_token:
            names = [eod_token]
        for name in names:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return token
        raise ValueError(f"{path}: no token {' or '.join(names)}: name another with --eod-token")

    def tokenize(self, text: str) -> list[int]:
        """Return the ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens=self._add_special_tokens).ids

    def tokenize_batch(self, texts: list[str]) -> typing.Any:
        """Return the ids of each text, as a list of arrays, or as one array of awkward."""
        if self._uses_gigatoken:
            return self._tokenize_by_gigatoken(texts)
        encodings = self._tokenizer.encode_batch_fast(
            texts, add_special_tokens=self._add_special_tokens
        )
        return [np.frombuffer(array.array("I", found.ids), np.uint32) for found in encodings]

    def detokenize(self, ids: typing.Iterable[int]) -> str:
        """Return the text of some ids, special tokens included."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def choose_engine(self, texts: list[str]) -> str:
        """Let gigatoken make the ids from now on, if it makes those of tokenizers for these texts.

        Returns   one line that says which of the two works, and why
        """
        reason = self._why_not_gigatoken(texts)
        self._uses_gigatoken = reason is None
        if reason is not None:
            return f"{self.path}: the package tokenizers works, not gigatoken: {reason}"
        count = _count(len(texts), "text")
        return f"{self.path}: gigatoken works; it makes the ids of tokenizers for {count} of these"

    def _why_not_gigatoken(self, texts):
        """Why gigatoken cannot make the ids, in words; None: it can."""
        if os.environ.get("MEGATRON_MIN_GIGATOKEN") == "0":
            return "MEGATRON_MIN_GIGATOKEN is 0"
        if self._add_special_tokens:
            return "it adds no special tokens to a text"
        token = _token_of_other_ids(json.loads(self._tokenizer.to_str()))
        if token is not None:
            return f"it may make other ids of texts with the added token {token!r}"
        wanted = [tokens.tolist() for tokens in self.tokenize_batch(texts)]
        try:
            found = self._tokenize_by_gigatoken(texts).to_list()
        except ModuleNotFoundError as error:
            return f"the package {error.name} is not installed (pip install gigatoken)"
        except Exception as error:  # it may refuse the file in any way
            return f"it does not take this file: {_one_line(error)}"
        if found != wanted:
            return "it makes other ids for texts of these inputs"
        return None

    def _tokenize_by_gigatoken(self, texts):
        """Return the ids of each text as an array of awkward."""
        contents = [text.encode() for text in texts]
        self._gigatoken_bytes += sum(len(content) for content in contents)
        if self._gigatoken is None or self._gigatoken_bytes > self._GIGATOKEN_BYTES:
            import gigatoken

            self._gigatoken = gigatoken.Tokenizer.from_json(self._tokenizer.to_str())
            self._gigatoken_bytes = 0
        return self._gigatoken.encode_batch(contents, parallel=False)

    def __getstate__(self):
        """Pickle all but what gigatoken has made, which cannot be pickled."""
        return self.__dict__ | {"_gigatoken": None}


def _token_of_other_ids(content):
    """Return an added token with which gigatoken makes other ids, without a word; None: no such.

    content   of a tokenizer.json.  What is told here was measured with gigatoken 0.10.0, on random
              texts of odd characters.
    """
    is_normalized = not _normalizers(content["normalizer"]) <= {"Sequence", "Prepend", "Replace"}
    puts_a_space_first = '"add_prefix_space": true' in json.dumps(content["pre_tokenizer"])
    for token in content["added_tokens"]:
        text = token["content"]
        if token["single_word"]:
            return text
        if is_normalized and (token["normalized"] or not text.isascii()):
            return text
        if text[:1].isspace() and (token["rstrip"] or puts_a_space_first):
            return text
    return None


def _normalizers(normalizer):
    """The types of a normalizer of a tokenizer.json, and of those that it consists of."""
    if normalizer is None:
        return set()
    types = {normalizer["type"]}
    for part in normalizer.get("normalizers", []):
        types |= _normalizers(part)
    return types


def _import_extra(module, extra, user):
    """Import a module of an optional package, and return it.

    extra    the extra of megatron-min that installs the package
    user     what needs the module, such as a file
    Raises   ImportError, a sentence that names user, package and extra, if it is not installed
    """
    package = module.partition(".")[0]
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # something that the package needs
            raise
        raise ImportError(
            f'{user} needs the package {package}: pip install {package}, or "megatron-min[{extra}]"'
        ) from None
    return importlib.import_module(module)


def build_tokenizer(
    name: str | os.PathLike = "bytes",
    eod_token: str | None = None,
    add_special_tokens: bool = False,
) -> typing.Any:
    """Return the tokenizer that a name means, as in the table above.

    eod_token           the text of the end-of-document token of a tokenizer.json; others know
                        their own
    add_special_tokens  of a tokenizer.json, see HuggingFaceTokenizer
    Raises              ValueError, OSError, ImportError or AttributeError if there is no such
                        tokenizer

    >>> build_tokenizer("null:100").eod
    100
    """
    name = os.fspath(name)
    if name.endswith(".json") or (name != "bytes" and os.path.isdir(name)):
        return HuggingFaceTokenizer(name, eod_token, add_special_tokens)
    if add_special_tokens:
        raise ValueError(f"{name}: only a tokenizer.json has special tokens to add")
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("null:"):
        return NullTokenizer(name.removeprefix("null:"))
    if ":" not in name:
        raise ValueError(
            f"unknown tokenizer {name!r}: use bytes, null:VOCAB, a tokenizer.json, a folder that "
            "holds one, or module:attribute"
        )
    return _tokenizer_of_module(name)


def _tokenizer_of_module(name):
    """Import "module:attribute"; return it if it is a tokenizer, else call it to make one."""
    # As with "python -m", the module may lie in the current folder, beside the data.
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        found = pkgutil.resolve_name(name)
        if hasattr(found, "tokenize") and not isinstance(found, type):
            return found
        if not callable(found):
            raise ValueError(f"{name} is no tokenizer, and cannot be called to make one")
        return found()
    finally:
        sys.path.remove(folder)


# ==============================================================================
# 18. Preprocessing
# ==============================================================================
# Question answered here: how is a big corpus tokenized, on all cores and on many machines?
#
#   this process         worker processes, each with a pipe        this process
#
#   reads the inputs     parse JSON, run the tokenizer             writes the pairs
#
#   block 0  -- pipe 1 ->  worker 1  -- tokens of block 0 ->  .bin, .idx
#   block 1  -- pipe 2 ->  worker 2  -- tokens of block 1 ->  .bin, .idx
#   block 2  -- pipe 1 ->  worker 1  ...
#
# This process goes round the workers: it takes the tokens of a block from the next one, sends it a
# new block, and writes the tokens.  So the tokens come in the order of the inputs, and the files do
# not depend on the number of workers: they are those of encode_jsonl() in section 2, one pair for
# each JSON key.  A worker has one block at a time, so nothing fills up; and a worker that dies is
# the end of its pipe, which is an error.  With one worker this process does its work.
#
# Many machines share the work as shards: n jobs, of which job i reads its share of the bytes of all
# inputs, laid end to end, and no others.  A line belongs to the shard in which it begins:
#
#   inputs        a.jsonl                       b.jsonl         c.jsonl.gz
#   lines         |------|---------|------------|----|----------|==================|
#   bytes         |           shard 0/3         :        shard 1/3        :       shard 2/3       |
#
# A compressed file and a Parquet file cannot be entered in the middle: they belong to the shard in
# which they begin.  The shards cut the documents in order, so their pairs, merged in order, are the
# files of one job, byte for byte.
#
#   books_text_document_00001_of_00003.bin, .idx       the pair of shard 1/3
#   books_text_document_00001_of_00003.record.json     what it was made from
#
# Each pair has such a record: the inputs, with the number of documents of each, the tokenizer, and
# the options.  It is the way back from a document to its input, and a job that is started again
# finds by it what is made already.  A record notes the sizes of its pair; beside another pair it is
# ignored.

# How much text a worker gets at a time.  Smaller blocks cost more messages; larger ones more
# memory, and the error of a worker that has died waits for the workers before it.
_BLOCK_BYTES = 1 << 19
_BLOCK_ROWS = 128  # the same for Parquet, which tells no bytes
_PROGRESS_SECONDS = 10.0  # the least time between two lines of progress
_SAMPLED_PLACES = 32  # of the inputs, where texts are taken to compare two tokenizers
_TEXTS_OF_A_PLACE = 4
_SAMPLED_CHARACTERS = 1 << 13  # of each of these texts


def preprocess(
    input: typing.Any = None,
    output_prefix: str | os.PathLike | None = None,
    tokenizer: typing.Any = None,
    *,
    texts: typing.Iterable | None = None,
    append_eod: bool = False,
    json_keys: str | list[str] | tuple[str, ...] = ("text",),
    split_sentences: bool = False,
    workers: int = 1,
    shard: tuple[int, int] = (0, 1),
    on_error: str = "stop",
    verbose: bool = False,
) -> dict[str, str]:
    """Write files of JSON lines as pairs, <output_prefix>_<key>_document.bin and .idx for each key.

    Blank lines are no documents.  Pairs that are there, made from the same inputs in the same way,
    as their records say, are not made anew.

    input         a path, URL or pattern such as s3://bucket/*.jsonl, or a list of these, which are
                  read in this order; the files of a pattern are read in sorted order.  A name that
                  ends in .parquet is a table whose columns are the keys; any other file holds JSON
                  lines, compressed if its name ends in .gz, .bz2, .xz or .zst.  "-" is standard
                  input.
    texts         in the place of input: an iterable of texts, or of dicts with the JSON keys
    tokenizer     an object as described in section 2, or its name as in section 17; default bytes
    output_prefix a folder in it that is missing is made
    append_eod    put tokenizer.eod after each document that has tokens
    json_keys     each key of these becomes a pair of its own
    split_sentences  each sentence becomes a sequence, as nltk finds sentences; the names end in
                  _sentence instead of _document
    workers       how many processes tokenize; the files are the same for any number
    shard         (i, n), 0 <= i < n: read the i-th of n parts of the inputs, and add its number to
                  the names, as in _00001_of_00016
    on_error      "stop": the first bad line is an error; "skip": bad lines are left out, and a
                  warning at the end gives their number and what was wrong with the first one
    verbose       print progress to stderr, at most every ten seconds, and once at the end
    Returns       {key: path prefix of its pair}
    Raises        ValueError that names file, line and reason; OSError; ImportError that names a
                  missing package.  Then no pair appears; if the error comes while several pairs
                  get their names, each is whole or not there.
    Upstream      tools/preprocess_data.py; the files are equal byte for byte

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     prefix = os.path.join(folder, "corpus")
    ...     prefixes = preprocess(texts=["aaaa", "bbb"], output_prefix=prefix, append_eod=True)
    ...     IndexedDataset(prefixes["text"])[:]
    [array([ 97,  97,  97,  97, 256], dtype=uint16), array([ 98,  98,  98, 256], dtype=uint16)]
    """
    if on_error not in ("stop", "skip"):
        raise ValueError(f"on_error must be stop or skip, got {on_error!r}")
    if workers < 1:
        raise ValueError(f"workers must be >= 1, got {workers}")
    if not 0 <= shard[0] < shard[1]:
        raise ValueError(f"wanted a shard i/n with 0 <= i < n, got {shard[0]}/{shard[1]}")
    if output_prefix is None:
        raise ValueError("preprocess wants an output_prefix")
    if (input is None) == (texts is None):
        raise ValueError("preprocess wants one of input, which are paths, and texts")
    if tokenizer is None:
        tokenizer = ByteTokenizer()
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = build_tokenizer(tokenizer)
    prefixes = _output_prefixes(output_prefix, json_keys, split_sentences, shard)
    encoder = _BlockEncoder(tokenizer, list(prefixes), append_eod, on_error == "skip")
    if split_sentences:
        encoder.sentence_splitter = _load_sentence_splitter()
    if texts is None:
        parts = _cut_inputs(_find_inputs(input), shard)
    else:
        parts = [_part_of_texts(texts, shard)]
    _make_folder_of(output_prefix)
    description = _describe_job(parts, encoder)
    if all(_is_made(prefix, description) for prefix in prefixes.values()):
        if verbose:
            _print_progress([f"{prefix} is there already" for prefix in prefixes.values()])
        return prefixes
    _write_pairs(parts, encoder, prefixes, workers, description, verbose)
    return prefixes


def _output_prefixes(output_prefix, json_keys, split_sentences, shard):
    """Return {key: path prefix of its pair}."""
    if isinstance(json_keys, str):
        json_keys = [json_keys]
    level = "sentence" if split_sentences else "document"
    prefixes = {}
    for key in json_keys:
        prefixes[key] = f"{os.fspath(output_prefix)}_{key}_{level}{_shard_name(shard)}"
    if len(prefixes) == 0:
        raise ValueError("preprocess wants at least one JSON key")
    return prefixes


def _make_folder_of(path):
    """Make the folder that a file is to be in, if there is none; object storage has no folders."""
    folder = os.path.dirname(path)
    if not folder or is_remote(path):
        return
    try:
        os.makedirs(folder, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise NotADirectoryError(
            f"{path}: wanted the name of a file in a folder, but {folder} is a file, or is in one"
        ) from None


def _write_pairs(parts, encoder, prefixes, workers, description, verbose):
    """Encode all parts of the inputs, and write the pair of each key and its record."""
    blocks = _read_blocks(parts, encoder.json_keys)
    if hasattr(encoder.tokenizer, "choose_engine"):
        first_block = next(blocks, None)
        if first_block is not None:
            blocks = itertools.chain([first_block], blocks)
            engine = encoder.tokenizer.choose_engine(_sample_texts(parts, first_block, encoder))
            log.info(engine)
            if verbose:
                _print_progress([engine])
    progress = _Progress(parts, verbose)
    with contextlib.ExitStack() as stack:
        builders = {}
        for key, prefix in prefixes.items():
            builder = IndexedDatasetBuilder(get_bin_path(prefix), encoder.dtype)
            builders[key] = stack.enter_context(builder)
        encoded_blocks = _encode_blocks(encoder, blocks, workers)
        # Closed even where an exception ends the loop, so that workers never outlive the job.
        stack.enter_context(contextlib.closing(encoded_blocks))
        for encoded in encoded_blocks:
            for key, column in encoded.columns.items():
                builders[key]._append(column.tokens, column.lengths, ends=column.ends)
            progress.update(encoded)
        for builder in builders.values():
            builder.sync()  # a full disk shows here, before the first pair has its name
        _finalize_all(builders, prefixes)
    for key, prefix in prefixes.items():
        _write_record(prefix, _record_of_job(description, key, progress.documents_of_part))
    progress.finish()


def _finalize_all(builders, prefixes):
    """Finalize each builder, even where another one fails; then raise the first error."""
    errors = []
    for key, prefix in prefixes.items():
        try:
            builders[key].finalize(get_idx_path(prefix))
        except OSError as error:  # such as an upload that failed, and says what to do
            errors.append(error)
    if len(errors) > 0:
        raise errors[0]


# -- Shards ------------------------------------------------------------------------------------


def _shard_name(shard):
    """What a shard adds to the names of its files; the names sort as the shards do."""
    index, count = shard
    if count == 1:
        return ""
    return f"_{index:05}_of_{count:05}"


def shard_of_launcher() -> tuple[int, int]:
    """Return the shard (i, n) that this process is to make of n, as its launcher says.

    torchrun sets RANK and WORLD_SIZE, Slurm's srun SLURM_PROCID and SLURM_NTASKS; without them
    this process makes the whole, (0, 1).  Beware of a script of sbatch that starts no srun: it is
    one process, and Slurm says to it that there are SLURM_NTASKS.
    """
    for rank, world_size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in os.environ and world_size in os.environ:
            return int(os.environ[rank]), int(os.environ[world_size])
    return 0, 1


@dataclasses.dataclass
class _Part:
    """The part of an input from one byte up to another: what begins there is read by this job."""

    path: str
    size: int | None  # of the whole input, in bytes; None: not known
    changed: typing.Any  # what tells the input from one that is written later; None: not known
    begin: int
    end: float  # math.inf: the end of the input, wherever that is
    texts: typing.Iterable | None = None  # the texts themselves, if the input is no file

    def is_whole(self):
        """Whether no other shard reads from this input."""
        return self.begin == 0 and self.end in (self.size, math.inf)

    def kind(self):
        """ "texts", "parquet", "compressed", or "lines"."""
        if self.texts is not None:
            return "texts"
        name = _format_name(self.path)
        if name.endswith(".parquet"):
            return "parquet"
        if _compression(name) is not None:
            return "compressed"
        return "lines"


def _part_of_texts(texts, shard):
    """Return the _Part of an iterable of texts."""
    if isinstance(texts, (str, bytes)):
        raise ValueError("texts must be an iterable of texts, and not one text")
    if shard[1] > 1:
        raise ValueError("texts cannot be cut into shards: give each job texts of its own")
    return _Part("texts", None, None, 0, math.inf, texts)


def _cut_inputs(paths, shard):
    """Return the _Parts of the inputs that a shard reads: an equal share of all their bytes."""
    index, count = shard
    parts = []
    for path in paths:
        if not is_remote(path) and not os.path.isfile(path):  # such as a pipe
            parts.append(_Part(path, None, None, 0, math.inf))
            if count > 1:
                raise ValueError(
                    f"{path}: its size is not known, so it cannot be cut into shards: write it to "
                    "a file first, or make the pair in one job (--shard 0/1)"
                )
            continue
        stamp = file_stamp(path)
        parts.append(_Part(path, stamp["size"], stamp["changed"], 0, stamp["size"]))
    if count == 1:
        return parts
    total = sum(part.size for part in parts)
    first = total * index // count
    last = total * (index + 1) // count
    cut = []
    start = 0  # where the input begins, if all inputs are laid end to end
    for part in parts:
        part.begin = max(first - start, 0)
        part.end = max(min(last - start, part.size), 0)
        start += part.size
        # An empty file has no byte that a shard could have: shard 0 says that it is empty.
        is_mine = part.begin < part.end or (part.size == 0 and index == 0)
        if part.kind() != "lines":  # it is read as a whole, or not at all
            is_mine = is_mine and part.begin == 0
            part.end = part.size
        if is_mine:
            cut.append(part)
    return cut


def check_all_shards(prefixes: typing.Sequence[str | os.PathLike]) -> None:
    """Check that prefixes which are to be merged have all shards of a corpus, in order, or none.

    Raises   ValueError that names the first shard that is missing or at another place

    >>> check_all_shards(["a_text_document_00000_of_00002", "a_text_document_00001_of_00002"])
    >>> check_all_shards(["a_text_document_00001_of_00002"])
    Traceback (most recent call last):
    ValueError: wanted a_text_document_00000_of_00002 in the place of a_text_document_00001_of_00002
    """
    wanted = []  # the shards of a corpus that must come next, in order
    for prefix in prefixes:
        prefix = os.fspath(prefix)
        name = re.fullmatch(r"(.*)_\d{5}_of_(\d{5})", prefix)
        if name is not None and len(wanted) == 0:
            count = int(name[2])
            wanted = [f"{name[1]}_{index:05}_of_{count:05}" for index in range(count)]
        if len(wanted) > 0:
            shard = wanted.pop(0)
            if prefix != shard:
                raise ValueError(f"wanted {shard} in the place of {prefix}")
    if len(wanted) > 0:
        raise ValueError(f"wanted {wanted[0]} too, after {prefix}: merge all shards, or none")


def merge(
    prefixes: typing.Iterable[str | os.PathLike],
    output_prefix: str | os.PathLike,
    multimodal: bool = False,
) -> None:
    """Append whole pairs, in the given order, into one new pair of the same dtype.

    The new pair equals the one that a single builder would have written, and its record joins the
    records of the pairs.  The output may not be one of the inputs.  Cost: each byte is copied once.
    Upstream: tools/merge_datasets.py.

    >>> prefix = toy_corpus()
    >>> merge([prefix, prefix], prefix + "2")
    >>> IndexedDataset(prefix + "2").document_indices.tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    if isinstance(prefixes, (str, os.PathLike)):
        prefixes = [prefixes]
    prefixes = list(prefixes)
    if not prefixes:
        raise ValueError("merge wants at least one input prefix")
    dtype = IndexedDataset(prefixes[0], check=False).dtype
    record = _join_records(prefixes)
    with IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
    _write_record(output_prefix, record)


# -- Records -----------------------------------------------------------------------------------
#
#   {"tokenizer": {...}, "options": {...},
#    "inputs": [{"name": "wiki-00.jsonl", "size": 600, "changed": ..., "begin": 0, "end": 600,
#                "documents": 3},
#               {"name": "wiki-01.jsonl", "size": 500, "changed": ..., "begin": 0, "end": 250,
#                "documents": 2}],
#    "bin": 1200, "idx": 130}                  the sizes of the pair, in bytes
#
# Here documents 0 to 2 of the pair are those of wiki-00.jsonl, and documents 3 and 4 are the first
# two of wiki-01.jsonl: the documents that begin in its first 250 bytes.


def read_record(path_prefix: str | os.PathLike) -> dict | None:
    """Return what a pair was made from, as its record says; None if it has none.

    None, too, if the record is of another pair, of other sizes.
    """
    try:
        with _open_input(_record_path(path_prefix)) as file:
            record = json.loads(file.read())
        if _sizes_of_pair(path_prefix) != {"bin": record["bin"], "idx": record["idx"]}:
            return None
    except Exception:  # it is missing, or no record, or cannot be read: no reason to stop
        return None
    return record


def input_of_document(record: dict | None, document: int) -> tuple[str | None, int | None]:
    """Return the name of the input that has a document of a pair, and its number in there, from 0.

    record     what read_record() returns; without a record the answer is (None, None)
    Raises     IndexError if the record has no such document

    A number counts documents: blank lines, and bad lines that were left out, are none.  Where a
    shard begins within an input, numbers count from there, and the name says from which byte on.

    >>> record = {"inputs": [{"name": "a", "begin": 0, "documents": 3},
    ...                      {"name": "b", "begin": 0, "documents": 2}]}
    >>> input_of_document(record, 4)
    ('b', 1)
    """
    if record is None:
        return None, None
    rest = operator.index(document)
    for found in record["inputs"]:
        if 0 <= rest < found["documents"]:
            return found["name"] + _from_byte(found["begin"]), rest
        rest -= found["documents"]
    raise IndexError(f"the record of the pair has no document {document}")


def warn_of_other_tokenizer(path_prefix: str | os.PathLike, tokenizer: typing.Any) -> None:
    """Warn if a pair was made with another tokenizer, as its record says: its ids mean other texts.

    Nothing is said of a pair without a record.
    """
    record = read_record(path_prefix)
    if record is None or record.get("tokenizer") is None:
        return
    identity = _identity_of_tokenizer(tokenizer)
    if record["tokenizer"] != identity:
        warnings.warn(
            f"{os.fspath(path_prefix)} was made with the tokenizer {record['tokenizer']}, and the "
            f"config has {identity}: the ids of one are other texts for the other",
            stacklevel=3,
        )


def _record_path(path_prefix):
    """The path of the record of a pair."""
    return f"{os.fspath(path_prefix)}.record.json"


def _sizes_of_pair(path_prefix):
    """The sizes of the files of a pair, in bytes."""
    return {
        "bin": file_stamp(get_bin_path(path_prefix))["size"],
        "idx": file_stamp(get_idx_path(path_prefix))["size"],
    }


def _identity_of_tokenizer(tokenizer):
    """The unique_identifiers of a tokenizer, as JSON gives them back; None if it has none."""
    identity = _attribute(tokenizer, "unique_identifiers")
    return json.loads(json.dumps(identity, default=str))


def _from_byte(begin):
    """What the name of an input says where something is counted from its middle on."""
    if begin == 0:
        return ""
    return f" from byte {begin:,} on"


def _describe_job(parts, encoder):
    """All that the pairs of a job depend on, as far as can be told without reading the inputs."""
    inputs = []
    for part in parts:
        end = part.end
        if end == math.inf:
            end = None
        name = hide_credentials(part.path)  # the record is a file, which others may read
        inputs.append(
            {
                "name": name,
                "size": part.size,
                "changed": part.changed,
                "begin": part.begin,
                "end": end,
            }
        )
    return {
        "tokenizer": _identity_of_tokenizer(encoder.tokenizer),
        "options": encoder.describe(),
        "inputs": inputs,
    }


def _record_of_job(description, key, documents_of_part):
    """The record of the pair of a key, whose parts gave so many documents."""
    inputs = []
    for part, documents in zip(description["inputs"], documents_of_part, strict=True):
        inputs.append(part | {"documents": documents})
    return description | {"json_key": key, "inputs": inputs}


def _is_made(prefix, description):
    """Whether a pair is there, whole, and was made from the same inputs in the same way."""
    if description["tokenizer"] is None:
        return False
    record = read_record(prefix)
    if record is None:
        return False
    for part in record["inputs"]:
        part.pop("documents")
        if part["changed"] is None:  # such as of standard input: it may be another one now
            return False
    return all(record.get(field) == description[field] for field in description)


def _write_record(prefix, record):
    """Write the record of a pair, which is there."""
    with NewFile(_record_path(prefix), synced=False) as file:
        file.write(json.dumps(record | _sizes_of_pair(prefix), indent=1).encode())


def _join_records(prefixes):
    """The record of the pair that merge() makes of these pairs."""
    inputs = []
    tokenizers = []
    options = []
    for prefix in prefixes:
        record = read_record(prefix)
        if record is None:  # such as upstream's pair: an input of its own
            documents = len(IndexedDataset(prefix, check=False).document_indices) - 1
            name = hide_credentials(os.fspath(prefix))
            whole = {"name": name, "size": None, "changed": None, "begin": 0, "end": None}
            record = {"inputs": [whole | {"documents": documents}]}
        for part in record["inputs"]:
            if len(inputs) > 0 and _goes_on(inputs[-1], part):
                inputs[-1]["documents"] += part["documents"]
                inputs[-1]["end"] = part["end"]
            else:
                inputs.append(part)
        tokenizers.append(record.get("tokenizer"))
        options.append(record.get("options"))
    joined = {"tokenizer": None, "options": None, "inputs": inputs}
    # What the pairs do not share cannot be said of the whole.
    if tokenizers.count(tokenizers[0]) == len(tokenizers):
        joined["tokenizer"] = tokenizers[0]
    if options.count(options[0]) == len(options):
        joined["options"] = options[0]
    return joined


def _goes_on(before, part):
    """Does a part of an input begin where the part before it, of the shard before, ends?"""
    is_same = all(before[field] == part[field] for field in ("name", "size", "changed"))
    return is_same and part["begin"] > 0 and before["end"] == part["begin"]


# -- Inputs ------------------------------------------------------------------------------------


def _find_inputs(inputs):
    """Return the paths and URLs of all files that are meant; "-" stays."""
    if isinstance(inputs, (str, os.PathLike)):
        inputs = [inputs]
    paths = []
    for path in inputs:
        path = os.fspath(path)
        if os.path.isdir(path):
            raise IsADirectoryError(f"{path} is a folder: name its files, as in '{path}/*.jsonl'")
        # A name that exists is a file, even where it contains a * or a [.
        if path == "-" or file_exists(path):
            paths.append(path)
            continue
        matches = _files_of_pattern(path)
        if len(matches) == 0:
            raise FileNotFoundError(f"{path}: no such file, and as a pattern it matches none")
        paths.extend(matches)
    if len(paths) == 0:
        raise ValueError("preprocess wants at least one input")
    for path in paths:
        if _format_name(path).endswith(".zip"):
            raise ValueError(f"{path}: a zip archive may hold several files: unpack it first")
    return paths


def _files_of_pattern(pattern):
    """Return the paths or URLs of the files that a pattern matches, sorted."""
    if not is_remote(pattern):
        found = sorted(glob.glob(pattern, recursive=True))
        return [path for path in found if not os.path.isdir(path)]
    import fsspec  # it comes with torch

    file_system, name = fsspec.core.url_to_fs(pattern)
    if not re.search(r"[*?\[]", name):
        return []
    found = file_system.glob(name, detail=True)
    files = [path for path in sorted(found) if found[path]["type"] != "directory"]
    return [file_system.unstrip_protocol(path) for path in files]


def _open_input(path):
    """Open a file or an object, to read bytes."""
    import fsspec

    if not is_remote(path):
        return fsspec.filesystem("file").open(os.path.abspath(path), "rb")
    file_system, name = fsspec.core.url_to_fs(path)
    return io.BufferedReader(_PatientFile(path, file_system.open(name, "rb")), 1 << 20)


class _PatientFile(io.RawIOBase):
    """An open object on object storage; a read that fails is tried again: most faults pass."""

    _PAUSES = (0.1, 0.3, 1, 3)  # seconds before each further try

    def __init__(self, path, file):
        self._path = path
        self._file = file

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        """Go to offset bytes after the beginning, the present position, or the end."""
        return self._file.seek(offset, whence)

    def readinto(self, buffer):
        """Fill the buffer, or a part of it; return how many bytes came."""
        position = self._file.tell()
        for pause in (*self._PAUSES, None):
            try:
                self._file.seek(position)
                content = self._file.read(len(buffer))
                break
            except Exception as error:  # each storage has errors of its own
                if pause is None:
                    fault = f"{type(error).__name__}: {error}"
                    raise ConnectionError(f"{self._path}: {fault}") from None
                time.sleep(pause)
        buffer[: len(content)] = content
        return len(content)

    def close(self):
        self._file.close()
        super().close()


def _format_name(path):
    """The name that tells the format of a file, in lower case: without the query of a URL."""
    if is_remote(path):
        path = path.partition("?")[0]
    return path.lower()


def _compression(name):
    """How a file of this name is compressed, as fsspec says it; None: it is not."""
    import fsspec

    if name.endswith(".zst"):
        return "zstd"
    return fsspec.utils.infer_compression(name)


# -- Reading -----------------------------------------------------------------------------------


@dataclasses.dataclass
class _Block:
    """Some lines of an input, or some rows, which one worker encodes."""

    part: int  # which one of the parts of the job it is of
    path: str
    first: int  # the number of its first line or row, counted from 1
    lines: bytes | list[dict]  # lines of JSON, up to the end of a line; or rows, parsed already
    num_bytes: int  # what the lines take up in the input: compressed bytes, if it is compressed
    origin: str = ""  # for a part of an input: from which byte on the lines are counted, in words

    def documents(self):
        """Return (number, line or row) of all that are not blank."""
        if isinstance(self.lines, list):
            return list(enumerate(self.lines))
        lines = []
        for index, line in enumerate(self.lines.split(b"\n")):
            if len(line) > 0 and not line.isspace():
                lines.append((index, line))
        return lines

    def place(self, index):
        """Where a line is, in words."""
        unit = "row" if isinstance(self.lines, list) else "line"
        return f"{self.path}: {unit} {self.first + index}{self.origin}"


def _read_blocks(parts, json_keys):
    """Yield the lines of all parts as _Blocks."""
    for number, part in enumerate(parts):
        for block in _read_part(part, json_keys):
            block.part = number
            yield block


def _read_part(part, json_keys):
    """Yield the lines of a part as _Blocks."""
    if part.kind() == "texts":
        yield from _read_texts(part, json_keys)
        return
    if part.path == "-":
        yield from _read_lines(part, sys.stdin.buffer)
        return
    with _open_input(part.path) as file:
        if part.kind() == "parquet":
            yield from _read_parquet(part, file, json_keys)
        elif part.kind() == "compressed":
            yield from _read_compressed(part, file)
        else:
            yield from _read_lines(part, file)


def _read_lines(part, file):
    """Yield the lines that begin in a part of an open file as _Blocks."""
    position = part.begin
    if position > 0:
        # The line in which the byte before lies belongs to the shard before this one.
        file.seek(position - 1)
        position += len(file.readline()) - 1
    origin = _from_byte(position)
    first = 1
    while position < part.end:
        lines = file.read(int(min(_BLOCK_BYTES, part.end - position)))
        if len(lines) == 0:
            _check_end(part, position)
            return
        if not lines.endswith(b"\n"):
            lines += file.readline()
        yield _Block(0, part.path, first, lines, len(lines), origin)
        first += lines.count(b"\n")
        position += len(lines)


def _check_end(part, position):
    """ValueError if an input ends before the size that it had when the job began."""
    if part.size is not None and position < part.size:
        raise ValueError(
            f"{part.path}: it had {part.size:,} bytes when this job began, and ends now after "
            f"{position:,}: it was cut off meanwhile"
        )


def _read_texts(part, json_keys):
    """Yield an iterable of texts, or of dicts, as _Blocks."""
    first = 1
    rows = []
    size = 0
    for text in part.texts:
        row = {json_keys[0]: text}
        if isinstance(text, collections.abc.Mapping):
            row = {key: text.get(key) for key in json_keys}
        rows.append(row)
        size += sum(len(str(value)) for value in row.values())
        if size >= _BLOCK_BYTES:
            yield _Block(0, part.path, first, rows, size)
            first += len(rows)
            rows = []
            size = 0
    if len(rows) > 0:
        yield _Block(0, part.path, first, rows, size)


def _read_compressed(part, file):
    """Yield the lines of an open file that is compressed as _Blocks."""
    first = 1
    position = 0
    text_file = _decompress(part.path, file)
    while True:
        try:
            lines = text_file.read(_BLOCK_BYTES) + text_file.readline()
        except ConnectionError:  # the file may be whole
            raise
        except Exception as error:  # each format has errors of its own
            raise ValueError(f"{part.path}: damaged, or cut off: {_one_line(error)}") from None
        if len(lines) == 0:
            _check_end(part, file.tell())
            return
        yield _Block(0, part.path, first, lines, file.tell() - position)
        first += lines.count(b"\n")
        position = file.tell()


def _decompress(path, file):
    """Return the open file decompressed, as its name says."""
    import fsspec

    compression = _compression(_format_name(path))
    if compression == "zstd":
        return io.BufferedReader(_ZstdText(path, file), 1 << 20)
    return fsspec.compression.compr[compression](file, mode="r")


class _ZstdText(io.RawIOBase):
    """What a .zst file holds.

    It may be made of several files, laid end to end: the package's own reader would end at the end
    of the first one, and would not notice that a file is cut off.
    """

    def __init__(self, path, file):
        zstandard = _import_extra("zstandard", "storage", path)
        # Files that "zstd --long" has made need memory for up to 2 GiB.
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._file = file
        self._frame = None  # what decompresses the frame that is being read; None: between two
        self._compressed = b""  # was read, and is not decompressed yet
        self._text = memoryview(b"")  # was decompressed, and is not given to the caller yet

    def readable(self):
        return True

    def readinto(self, buffer):
        """Fill the buffer, or a part of it; return how many bytes came, 0 at the end."""
        while len(self._text) == 0:
            if len(self._compressed) == 0:
                self._compressed = self._file.read(1 << 16)
            if len(self._compressed) == 0:
                if self._frame is not None:
                    raise EOFError("it ends in the middle of a frame")
                return 0
            self._decompress_more()
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def _decompress_more(self):
        """Decompress what was read, up to the end of the frame."""
        if self._frame is None:
            self._frame = self._decompressor.decompressobj()
        self._text = memoryview(self._frame.decompress(self._compressed))
        self._compressed = self._frame.unused_data
        if self._frame.eof:
            self._frame = None


def _read_parquet(part, file, json_keys):
    """Yield the rows of an open Parquet file as _Blocks; only the columns of the keys are read."""
    table = _open_parquet(part.path, file)
    for key in json_keys:
        if key not in table.schema_arrow.names:
            names = ", ".join(table.schema_arrow.names)
            raise ValueError(f"{part.path}: wanted a column {key!r}, got {names}")
    first = 1
    bytes_a_row = part.size / max(table.metadata.num_rows, 1)
    batches = table.iter_batches(_BLOCK_ROWS, columns=json_keys)
    while True:
        try:
            batch = next(batches, None)
            if batch is None:
                return
            rows = batch.to_pylist()
        except ConnectionError:
            raise
        except Exception as error:  # pyarrow raises many kinds
            raise ValueError(f"{part.path}: damaged: {_one_line(error)}") from None
        yield _Block(0, part.path, first, rows, round(len(rows) * bytes_a_row))
        first += len(rows)


def _open_parquet(path, file):
    """Return pyarrow's ParquetFile of a path or an open file; ValueError if it is none."""
    parquet = _import_extra("pyarrow.parquet", "storage", path)
    try:
        return parquet.ParquetFile(file)
    except ConnectionError:
        raise
    except Exception as error:  # pyarrow raises many kinds
        raise ValueError(f"{path}: damaged, or no Parquet file: {_one_line(error)}") from None


def _sample_texts(parts, first_block, encoder):
    """Return a hundred texts or so, from all over the inputs, where these can be sought."""
    blocks = [first_block]
    chosen = parts[:: max(1, len(parts) // _SAMPLED_PLACES)]
    for part in chosen:
        if part.end == math.inf:  # it can be read once
            continue
        places = 1
        if part.kind() == "lines":
            places = max(1, _SAMPLED_PLACES // len(chosen))
        for place in range(places):
            begin = part.begin + int(part.end - part.begin) * place // places
            blocks.append(_first_block_from(dataclasses.replace(part, begin=begin), encoder))
    texts = []
    for block in blocks:
        if block is not None:
            texts += encoder.texts_of(block, _TEXTS_OF_A_PLACE)
    # Half a surrogate is no character, and an error of every tokenizer: without it.
    return [text[:_SAMPLED_CHARACTERS].encode(errors="ignore").decode() for text in texts]


def _first_block_from(part, encoder):
    """Return the first _Block of a part; None if there is none that can be read."""
    try:
        with contextlib.closing(_read_part(part, encoder.json_keys)) as blocks:
            return next(blocks, None)
    except (OSError, ValueError):  # the job finds it too, and says it
        return None


# -- Encoding ----------------------------------------------------------------------------------


@dataclasses.dataclass
class _Column:
    """The documents of a block under one JSON key, as IndexedDatasetBuilder._append wants them."""

    tokens: np.ndarray  # of all documents, laid end to end
    lengths: list[int]  # in tokens, of each sequence that has tokens; most texts are one
    ends: list[int]  # how many of the lengths belong to this document and those before it


@dataclasses.dataclass
class _EncodedBlock:
    """What became of a _Block."""

    part: int
    columns: dict[str, _Column]
    num_documents: int
    num_skipped: int  # bad lines
    first_fault: str | None  # what is wrong with the first of these
    num_bytes: int  # as in _Block


class _BlockEncoder:
    """Turn blocks of JSON lines into tokens, lengths and ends, for each JSON key.

    lines                    tokens                 lengths   ends
    {"text": "aaaa"}         a a a a $ b b b $      5         1   one sequence so far
    {"text": ""}             ($ is eod)                       1   no sequence more
    {"text": ["b", "bb"]}                           1, 3      3   three sequences

    sentence_splitter   None: a text is one sequence; else its tokenize() cuts a text into the
                        sentences that become sequences; the eod goes after the last one
    """

    def __init__(self, tokenizer, json_keys, append_eod, skip_errors):
        self.tokenizer = tokenizer
        self.json_keys = json_keys
        self.skip_errors = skip_errors
        self.sentence_splitter = None
        self.dtype = np.dtype(DType.optimal_dtype(tokenizer.vocab_size))
        self.eod = _as_tokens([], self.dtype)
        if append_eod:
            eod = _attribute(tokenizer, "eod")
            if eod is None:
                raise ValueError("append_eod wants a tokenizer with eod: this one has none")
            self.eod = _as_tokens([eod], self.dtype)

    def describe(self):
        """All that the tokens of a block depend on, but the block and the tokenizer's identity."""
        return {
            "version": __version__,
            "vocab_size": self.tokenizer.vocab_size,
            "eod": self.eod.tolist(),
            "json_keys": self.json_keys,
            "skip_errors": self.skip_errors,
            "sentences": type(self.sentence_splitter).__name__,
        }

    def encode(self, block):
        """Return a _Block as an _EncodedBlock; ValueError at the first bad line, or skip them."""
        documents = block.documents()
        faults = []
        try:
            columns = self._tokenize([self._parse(line) for _, line in documents])
        except Exception:
            # A tokenizer may raise anything, and says nothing about lines: look for the bad one.
            rows, faults = self._find_good_rows(block, documents)
            columns = self._tokenize(rows)
        return _EncodedBlock(
            part=block.part,
            columns=columns,
            num_documents=len(documents) - len(faults),
            num_skipped=len(faults),
            first_fault=faults[0] if faults else None,
            num_bytes=block.num_bytes,
        )

    def texts_of(self, block, count):
        """Return the texts of the first documents of a block, without bad lines."""
        texts = []
        for _, line in block.documents()[:count]:
            try:
                row = self._parse(line)
            except Exception:  # a bad line: the job finds it, too
                continue
            for key in self.json_keys:
                texts.extend(_sentences(row[key]))
        return texts

    def _parse(self, line):
        """Return the row of a line; ValueError unless each key holds text."""
        row = line
        if isinstance(line, bytes):
            row = json.loads(line)
        for key in self.json_keys:
            if not isinstance(row, dict) or not _is_text(row.get(key)):
                found = str(line)[:60]
                raise ValueError(f"wanted a JSON object with text under {key!r}, got {found}")
        return row

    def _find_good_rows(self, block, documents):
        """Return (the rows of all good lines, [what is wrong with each bad line])."""
        rows = []
        faults = []
        for index, line in documents:
            try:
                row = self._parse(line)
                self._tokenize([row])
                rows.append(row)
            except Exception as error:
                fault = f"{block.place(index)}: {_one_line(error)}"
                if not self.skip_errors:
                    advice = "--on-error skip leaves such lines out"
                    raise ValueError(f"{fault} ({advice})") from error
                faults.append(fault)
        return rows, faults

    def _tokenize(self, rows):
        """Return {key: _Column} of some documents."""
        columns = {}
        for key in self.json_keys:
            texts = []  # of all documents
            counts = []  # how many of the texts each document has
            for row in rows:
                parts = self._split(row[key])
                texts.extend(parts)
                counts.append(len(parts))
            columns[key] = self._lay_end_to_end(self._tokenize_texts(texts), counts)
        return columns

    def _split(self, text):
        """Return the texts that become the sequences of a document."""
        sentences = _sentences(text)
        if self.sentence_splitter is None:
            return sentences
        parts = []
        for sentence in sentences:
            parts.extend(self.sentence_splitter.tokenize(sentence))
        return parts

    def _tokenize_texts(self, texts):
        """Return the ids of each text as an array of the dtype of the file."""
        if hasattr(self.tokenizer, "tokenize_batch"):
            batch = self.tokenizer.tokenize_batch(texts)
        else:
            batch = [self.tokenizer.tokenize(text) for text in texts]
        if len(batch) != len(texts):
            raise ValueError(f"tokenize_batch returned {len(batch)} lists for {len(texts)} texts")
        return _as_arrays(batch, self.dtype)

    def _lay_end_to_end(self, arrays, counts):
        """Return a _Column of the tokens of texts, of which counts[d] are document d, with eods."""
        pieces = [_as_tokens([], self.dtype)]  # so that there is something to concatenate
        lengths = []
        ends = []
        first = 0
        for count in counts:
            sequences = [tokens for tokens in arrays[first : first + count] if len(tokens) > 0]
            first += count
            if len(sequences) > 0:
                pieces.extend(sequences)
                pieces.append(self.eod)
                lengths.extend([len(tokens) for tokens in sequences])
                lengths[-1] += len(self.eod)
            ends.append(len(lengths))
        return _Column(np.concatenate(pieces), lengths, ends)


def _load_sentence_splitter():
    """Return nltk's Punkt for English; without its model, an untrained one, and a warning."""
    punkt = _import_extra("nltk.tokenize.punkt", "tools", "--split-sentences")
    try:
        return punkt.PunktTokenizer("english")
    except LookupError:
        warnings.warn(
            "nltk has no model of English sentences here, so those of its untrained Punkt are "
            'taken, which end after "Dr." too: python -m nltk.downloader punkt_tab',
            stacklevel=3,
        )
        return punkt.PunktSentenceTokenizer()


def _is_text(value):
    """Is this a text, or a list of texts, its sentences?"""
    if isinstance(value, list):
        return all(isinstance(sentence, str) for sentence in value)
    return isinstance(value, str)


# -- Workers -----------------------------------------------------------------------------------


def _encode_blocks(encoder, blocks, workers):
    """Yield each block encoded, in order; by worker processes if there is more than one."""
    if workers > 1:
        yield from _encode_in_processes(encoder, blocks, workers)
        return
    for block in blocks:
        yield encoder.encode(block)


def _encode_in_processes(encoder, blocks, workers):
    """Yield each block encoded, in order, by worker processes."""
    # A forked process has everything at once; the other ways to start one import torch again.
    # Elsewhere than on Linux a library may not survive a fork, or there is none.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)
    processes = []
    idle = collections.deque()  # the pipes of workers that have no block
    busy = collections.deque()  # those of the others, in the order of their blocks
    fault = None
    try:
        for _ in range(workers):
            pipe, end_of_worker = context.Pipe()
            arguments = (end_of_worker, pipe, encoder)
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            processes.append(process)
            end_of_worker.close()  # so that the pipe ends when the worker does
            idle.append(pipe)
        while fault is None:
            try:
                block = next(blocks, None)
            except Exception as error:  # the blocks before it may have an earlier fault
                fault = error
                break
            if block is None:
                break
            encoded = None
            if len(idle) == 0:
                idle.append(busy.popleft())
                encoded = _receive(idle[0])
            _send(idle[0], block)
            busy.append(idle.popleft())
            if encoded is not None:
                yield encoded  # it is written while the worker has a block already
        for pipe in busy:
            yield _receive(pipe)
        if fault is not None:
            raise fault
    finally:
        for process in processes:
            process.kill()
            process.join()


def _work(pipe, end_of_parent, encoder):
    """Encode the blocks that come through a pipe: this is all that a worker process does.

    It ends when its parent does, because that ends the pipe, unless this process holds the other
    end, too.  A worker that was started later may hold it; but the last one ends first.
    """
    end_of_parent.close()
    # A terminal sends Ctrl-C to all processes.  The parent alone answers: it ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The processes keep all cores busy already: threads of the tokenizers library would compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with contextlib.suppress(EOFError, OSError):
        while True:
            block = pipe.recv()
            try:
                answer = encoder.encode(block)
            except Exception as error:
                answer = ValueError(str(error))
            pipe.send(answer)


def _send(pipe, block):
    """Send a block to a worker, which waits for it; ChildProcessError if it has died."""
    try:
        pipe.send(block)
    except OSError:
        raise _worker_died() from None


def _receive(pipe):
    """Return what a worker has made of its block; its error is raised here."""
    try:
        answer = pipe.recv()
    except (EOFError, OSError):
        raise _worker_died() from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _worker_died():
    """The error of a pipe that has ended."""
    return ChildProcessError(
        "a worker process was killed, perhaps for lack of memory: use fewer workers"
    )


# -- Progress ----------------------------------------------------------------------------------


class _Progress:
    """Count what is done, and print it to stderr: now and then, and once at the end."""

    def __init__(self, parts, verbose):
        self.parts = parts
        self.verbose = verbose
        self.total_bytes = sum(part.end - part.begin for part in parts)  # math.inf: not known
        self.documents_of_part = [0] * len(parts)
        self.num_skipped = 0
        self.first_fault = None
        self.num_bytes = 0
        self.started = time.perf_counter()
        self.printed = self.started

    def update(self, encoded):
        """Count an _EncodedBlock; print a line if the last line is ten seconds old."""
        self.documents_of_part[encoded.part] += encoded.num_documents
        self.num_skipped += encoded.num_skipped
        self.num_bytes += encoded.num_bytes
        if self.first_fault is None:
            self.first_fault = encoded.first_fault
        now = time.perf_counter()
        if self.verbose and now - self.printed >= _PROGRESS_SECONDS:
            self.printed = now
            _print_progress([*self._counts(now), *self._time_left(now)])

    def finish(self):
        """Print the last line, and warn of lines and files that gave no document."""
        now = time.perf_counter()
        seconds = datetime.timedelta(seconds=round(now - self.started))
        if self.verbose:
            _print_progress([*self._counts(now), f"done in {seconds}"])
        if self.num_skipped:
            first = hide_credentials(self.first_fault)
            warnings.warn(
                f"left out {_count(self.num_skipped, 'bad line')}; the first: {first}", stacklevel=4
            )
        empty = []
        for part, documents in zip(self.parts, self.documents_of_part, strict=True):
            if documents == 0 and part.is_whole():
                empty.append(part.path)
        if len(empty) > 0:
            names = hide_credentials(", ".join(empty[:3]))
            warnings.warn(
                f"no document came from {_count(len(empty), 'input')}: {names}", stacklevel=4
            )

    def _counts(self, now):
        """What was done, and how fast, in words."""
        documents = sum(self.documents_of_part)
        done = _size(self.num_bytes)
        if self.num_bytes < self.total_bytes < math.inf:
            done = f"{done} of {_size(self.total_bytes)}"
        seconds = max(now - self.started, 1e-3)
        rates = [f"{self.num_bytes / seconds / 1e6:,.1f} MB/s"]
        rates.append(f"{documents / seconds:,.0f} documents/s")
        return [_count(documents, "document"), done, *rates]

    def _time_left(self, now):
        """The time that the rest takes if it goes on like this, in words; nothing if unknown."""
        if self.total_bytes == math.inf or self.num_bytes == 0:
            return []
        bytes_left = max(self.total_bytes - self.num_bytes, 0)
        seconds = (now - self.started) * bytes_left / self.num_bytes
        return [f"{datetime.timedelta(seconds=round(seconds))} left"]


def _print_progress(words):
    """Print one line to stderr."""
    with contextlib.suppress(OSError):  # that nobody reads the progress is no reason to stop
        print(hide_credentials(", ".join(words)), file=sys.stderr, flush=True)


def _count(number, noun):
    """1, "document" -> "1 document"; 1000, "document" -> "1,000 documents"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def _size(num_bytes):
    """A number of bytes as a person reads it."""
    if num_bytes < 100_000:
        return _count(num_bytes, "byte")
    return f"{num_bytes / 1e6:,.1f} MB"


# ==============================================================================
# 19. Fine-tuning data
# ==============================================================================
# Question answered here: how does a conversation become a sample, at access?
#
#   a row       {"messages": [{"role": "user", "content": "2+2"},
#                             {"role": "assistant", "content": "4"}]}
#
#   text        u s e r :   2 + 2 ; a s s i s t a n t :   4 $      ; is a line end, $ is eod
#   targets     . . . . . . . . . . . . . . . . . . . . . 4 $      . is -100: nothing to learn here
#
#   a sample    |<- conversation 0 ->|<-- conversation 1 -->|<- filled up ->|     S + 1 places
#   tokens      all places but the last
#   labels      all targets but the first: the label of a token is the target of the next one
#   cu_seqlens  0                    ^ begins conversation 1                S S S ...
#
# A sample is made of one row of the file, and its text is tokenized when the sample is read.  So
# there is no pair of files, no shuffled order and no cache: sample k is row k of the split, modulo
# the number of rows, and the cyclic sampler of section 8 shuffles where that is wanted.
#
# A row may hold several conversations: each "system" message begins a new one.  Attention stays
# within a conversation: cu_seqlens says where each begins, as attention kernels for packed
# sequences want it, and positions count from 0 in each.

_IGNORED = -100  # the target of a place where nothing is learned; torch's cross_entropy skips it


class SFTDataset(MegatronDataset):
    """Samples of conversations, tokenized at access.  Upstream: SFTDataset.

    dataset        JsonlRows or ParquetRows
    dataset_path   the path of the file
    indices        int32, the rows of this split
    num_samples    how many samples; None: each row once
    config         GPTDatasetConfig without create_attention_mask, reset_attention_mask and
                   reset_position_ids

    ds[k] is a dict of new tensors:
      tokens, labels   int64 (S,); labels are -100 where nothing is learned, and keep the pad id
      loss_mask        float32 (S,), 0 where the label is -100 or padding
      position_ids     int64 (S,), from 0 in each conversation
      cu_seqlens       int32 (S+1,): where the conversations begin, and then S in all entries left
      max_seqlen       int32 (): the length of the longest conversation, with its padding
    ds[None] is sample 0 without any loss.  A row without messages that can be used is a ValueError
    that names its file and its line.  Cost: to tokenize one row for each sample.

    The tokenizer may have tokenize_conversation(conversation, return_target=True,
    add_generation_prompt=False) -> tokens, targets, as upstream's tokenizers for fine-tuning have.
    Any other tokenizer gets the template of encode_conversation().

    A sample that is too long is cut, and one that is too short is filled with tokenizer.pad.  A
    tokenizer without pad fills with eod; only the filled places are masked then, so that each real
    eod is learned.  With context_parallel_size cp > 1 each conversation is filled up to a multiple
    of 2 * cp tokens, so that section 9 can cut it for the ranks.  eod_mask_loss changes nothing:
    the targets say what is learned.

    >>> folder = tempfile.TemporaryDirectory()
    >>> path = os.path.join(folder.name, "chat.jsonl")
    >>> messages = [{"role": "u", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    >>> with open(path, "w") as file:
    ...     _ = file.write(json.dumps({"messages": messages}))
    >>> config = GPTDatasetConfig(1234, 24, blend=([path], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> rows = SFTDataset.build_low_level_dataset(path, config)
    >>> ds = SFTDataset(rows, path, np.arange(1, dtype=np.int32), None, Split.train, config)
    >>> ByteTokenizer().detokenize(ds[0]["tokens"])
    'u: 2+2\\nassistant: 4'
    >>> ds[0]["labels"][ds[0]["loss_mask"] == 1].tolist()         # what is learned: 4 and eod
    [52, 256]
    >>> folder.cleanup()
    """

    def __init__(
        self,
        dataset: "JsonlRows | ParquetRows",
        dataset_path: str | os.PathLike | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        for name in ("create_attention_mask", "reset_attention_mask", "reset_position_ids"):
            if getattr(config, name):
                raise ValueError(
                    f"{name} must be False for SFTDataset: cu_seqlens and position_ids keep the "
                    "conversations of a sample apart"
                )
        if self.num_samples and not len(self.indices):
            raise ValueError(
                f"{_name(self)}: {index_split.name} of split {config.split!r} holds no rows for "
                f"{self.num_samples} samples: enlarge it"
            )
        self._pad_token_id = _attribute(config.tokenizer, "pad")
        self._fill_token_id = self._pad_token_id
        if self._pad_token_id is None:
            self._fill_token_id = _attribute(config.tokenizer, "eod")
        if self._fill_token_id is None:
            raise ValueError(
                "SFTDataset fills short samples with the tokenizer's pad, or else its eod: this "
                "tokenizer has neither"
            )
        self._granularity = 1
        if config.context_parallel_size is not None and config.context_parallel_size > 1:
            self._granularity = 2 * config.context_parallel_size

    @staticmethod
    def build_low_level_dataset(
        dataset_path: str | None, config: GPTDatasetConfig
    ) -> "JsonlRows | ParquetRows":
        """Open a file of rows: Parquet if the name ends in .parquet, else JSON lines."""
        if dataset_path is None:
            raise ValueError(
                "SFTDataset has no mock data: give a blend of .jsonl or .parquet files"
            )
        if os.fspath(dataset_path).endswith(".parquet"):
            return ParquetRows(dataset_path)
        return JsonlRows(dataset_path)

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: "JsonlRows | ParquetRows") -> int:
        """Return the number of rows of the file."""
        return len(low_level_dataset)

    def __len__(self) -> int:
        return len(self.indices) if self.num_samples is None else self.num_samples

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        if idx is None:
            sample = self[0]
            sample["loss_mask"].zero_()
            return sample
        k = _position(idx, len(self), f"the samples of {_name(self)}")
        row = int(self.indices[k % len(self.indices)])
        S = self.config.sequence_length
        tokens, targets, is_filled, ends = pack_conversations(
            self._encode_row(row), S, self._fill_token_id, self._granularity
        )
        labels = targets[1:].copy()
        is_learned = (labels != _IGNORED) & ~is_filled[1:]
        if self._pad_token_id is not None:
            is_learned &= labels != self._pad_token_id
        cu_seqlens = np.full(S + 1, S, np.int32)
        cu_seqlens[: len(ends)] = ends[: S + 1]
        sample = {
            "tokens": tokens[:-1].copy(),
            "labels": labels,
            "loss_mask": is_learned.astype(np.float32),
            "position_ids": positions_from(ends[:-1], S),
            "cu_seqlens": cu_seqlens,
            "max_seqlen": np.array(np.diff(ends).max(), np.int32),
        }
        return {key: torch.from_numpy(values) for key, values in sample.items()}

    def _encode_row(self, row):
        """Yield (tokens, targets), int64, of one conversation of a row after the other."""
        try:
            for conversation in split_conversations(self.dataset[row]):
                tokens, targets = self._encode(conversation)
                if len(tokens) != len(targets):
                    raise ValueError(
                        f"the tokenizer gave {len(tokens)} tokens and {len(targets)} targets"
                    )
                yield np.asarray(tokens, np.int64), np.asarray(targets, np.int64)
        except Exception as error:
            raise ValueError(f"{self.dataset.describe_place(row)}: {error}") from error

    def _encode(self, conversation):
        """The tokens and targets of one conversation, by the tokenizer's template or by ours."""
        tokenizer = self.config.tokenizer
        tokenize_conversation = _attribute(tokenizer, "tokenize_conversation")
        if tokenize_conversation is None:
            return encode_conversation(conversation, tokenizer)
        return tokenize_conversation(conversation, return_target=True, add_generation_prompt=False)

    def made_from(self) -> dict:
        """Return which rows of which file the samples are made from."""
        return {"documents": _describe_documents(self.indices)} | self.dataset.identity()

    @property
    def is_stable(self) -> bool:
        """Sample k is the same row, however many samples are asked for."""
        return True


def split_conversations(messages: list[dict]) -> list[list[dict]]:
    """Cut the messages of a row into conversations: each system message begins a new one.

    Anything but a list of messages is a ValueError.

    >>> messages = [{"role": role, "content": "hi"} for role in ("user", "system", "user")]
    >>> [len(conversation) for conversation in split_conversations(messages)]
    [1, 2]
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(
            'wanted "messages", a list of {"role": ..., "content": ...}, '
            f"got {str(messages)[:80]}"
        )
    conversations = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f'a message wants a "role", got {str(message)[:80]}')
        if message["role"] == "system" or not conversations:
            conversations.append([])
        conversations[-1].append(message)
    return conversations


def encode_conversation(
    conversation: typing.Sequence[dict], tokenizer: typing.Any
) -> tuple[list[int], list[int]]:
    """Return the tokens and the targets of a conversation, by a plain template.

    A message is the line "role: content".  Only the content of the assistant's messages and the eod
    that ends each of them are learned; eod stands in the place of the line's end there.

    >>> messages = [{"role": "u", "content": "2"}, {"role": "assistant", "content": "4"}]
    >>> tokens, targets = encode_conversation(messages, ByteTokenizer())
    >>> bytes(tokens[:-1]), tokens[-1]
    (b'u: 2\\nassistant: 4', 256)
    >>> targets[-3:]
    [-100, 52, 256]
    """
    tokens = []
    targets = []
    for message in conversation:
        content = message.get("content")
        if not isinstance(content, str):
            raise ValueError(f'a message wants a text as "content", got {str(content)[:80]}')
        if message["role"] == "assistant":
            prompt = list(tokenizer.tokenize("assistant: "))
            answer = [*tokenizer.tokenize(content), tokenizer.eod]
        else:
            prompt = list(tokenizer.tokenize(f"{message['role']}: {content}\n"))
            answer = []
        tokens += prompt + answer
        targets += [_IGNORED] * len(prompt) + answer
    return tokens, targets


def pack_conversations(
    encoded: typing.Iterable[tuple[np.ndarray, np.ndarray]],
    sequence_length: int,
    fill: int,
    granularity: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
    """Lay conversations end to end in the S + 1 places of a sample.

    encoded       (tokens, targets) of each conversation, as many as fit; what is too long is cut
    fill          the id that fills up tokens and targets, to S + 1 and to the granularity
    granularity   the place where a conversation ends is a multiple of it
    Returns       tokens and targets, int64 (S+1,); a bool (S+1,), True at filled places; and the
                  list of the places where conversations end, from 0 to S

    The last place always holds the fill id, as in upstream: at most S tokens are those of
    conversations.

    >>> two = [([1, 2, 3], [-100, 2, 3]), ([4, 5], [4, 5])]
    >>> tokens, targets, is_filled, ends = pack_conversations(two, 8, 0, granularity=4)
    >>> tokens.tolist(), ends
    ([1, 2, 3, 0, 4, 5, 0, 0, 0], [0, 4, 8])
    """
    S = sequence_length
    tokens = np.full(S + 1, fill, np.int64)
    targets = np.full(S + 1, fill, np.int64)
    is_filled = np.ones(S + 1, bool)
    ends = [0]
    for conversation_tokens, conversation_targets in encoded:
        begin = ends[-1]
        end = begin + len(conversation_tokens)
        room = S - begin
        places = slice(begin, min(end, S))
        tokens[places] = conversation_tokens[:room]
        targets[places] = conversation_targets[:room]
        is_filled[places] = False
        ends.append(_ceil_div(end, granularity) * granularity)
        if ends[-1] > S:
            break
    ends[-1] = S
    return tokens, targets, is_filled, ends


class JsonlRows:
    """The rows of a file of JSON lines, by number.  Only the place of each line is kept in memory.

    Blank lines are no rows.  Cost: one pass over the file to open it, 8 bytes for each row; one
    read for each row.  Objects can be pickled, and used by threads and by forked processes.
    """

    _BLOCK = 1 << 22  # bytes that are read at once where the whole file is read

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        if self.path.endswith((".gz", ".zst", ".bz2", ".xz")):
            raise ValueError(
                f"{self.path}: rows are read in any order, and a compressed file can only be read "
                "from its beginning: decompress it first"
            )
        self._open()
        self._starts = self._find_lines()

    def _open(self):
        """Open the file, to read rows from it."""
        self._file = open(self.path, "rb", buffering=0)
        weakref.finalize(self, self._file.close)  # closes the file when this object is gone

    def _find_lines(self):
        """int64 (rows + 1,): where each row begins, and the size of the file.

        A row reaches to where the next one begins, so it includes the blank lines behind it.
        """
        starts = array.array("q")
        position = 0
        with open(self.path, "rb", buffering=self._BLOCK) as file:
            for line in file:
                if not line.isspace():
                    starts.append(position)
                position += len(line)
        starts.append(position)
        return np.frombuffer(starts, np.int64)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, row: int) -> typing.Any:
        """Return the "messages" of a row; None if the row has none."""
        begin, end = self._starts[row : row + 2].tolist()
        line = _pread(self._file, end - begin, begin)
        try:
            value = json.loads(line)
        except ValueError as error:
            raise ValueError(f"no JSON: {error}") from None
        return value.get("messages") if isinstance(value, dict) else None

    def describe_place(self, row: int) -> str:
        """Return the file and the number of the line, for errors: the lines before are counted."""
        begin = int(self._starts[row])
        line_number = 1
        for position in range(0, begin, self._BLOCK):
            count = min(self._BLOCK, begin - position)
            line_number += _pread(self._file, count, position).count(b"\n")
        return f"{self.path}, line {line_number}"

    def identity(self) -> dict:
        """Return what tells this file from another: its size and a digest of its two ends."""
        return _identity_of_file(self._file, int(self._starts[-1]))

    def __getstate__(self):
        """Leave the open file out of a pickle."""
        state = self.__dict__.copy()
        del state["_file"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


def _identity_of_file(file, size):
    """The size of an open file, and a digest of its first and its last bytes."""
    first = _pread(file, 65536, 0)
    last = _pread(file, 65536, max(0, size - 65536))
    return {"size": size, "file_ends": _md5(first + last)}


class ParquetRows:
    """The rows of a Parquet file, by number, read with the package pyarrow (extra "storage").

    Parquet is read in row groups, and the last one is kept.  So rows in order cost little, and rows
    in any order want small row groups: pyarrow.parquet.write_table(..., row_group_size=1000).
    """

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        self._open()

    def _open(self):
        """Open the file, and see in its footer where the row groups begin."""
        os.stat(self.path)  # of a missing file pyarrow would say that it is damaged
        self._file = _open_parquet(self.path, self.path)
        names = self._file.schema_arrow.names
        if "messages" not in names:
            raise ValueError(f'{self.path}: wanted a column "messages", found {", ".join(names)}')
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        self._starts = np.cumsum([0, *sizes])
        self._kept = None, None  # the number of the last row group that was read, and its messages

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, row: int) -> typing.Any:
        """Return the "messages" of a row, a list of dicts."""
        group = int(np.searchsorted(self._starts, row, side="right")) - 1
        kept_group, messages = self._kept
        if kept_group != group:
            # without threads of pyarrow's own, which a forked process would lack
            table = self._file.read_row_group(group, columns=["messages"], use_threads=False)
            messages = table.column("messages")
            self._kept = group, messages
        return messages[row - int(self._starts[group])].as_py()

    def describe_place(self, row: int) -> str:
        """Return the name of the file and the number of the row, from 1."""
        return f"{self.path}, row {row + 1}"

    def identity(self) -> dict:
        """Return what tells this file from another: its size and a digest of its two ends."""
        with open(self.path, "rb") as file:
            return _identity_of_file(file, os.path.getsize(self.path))

    def __getstate__(self):
        """A pickle is the path: the file is opened again."""
        return {"path": self.path}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()


# ==============================================================================
# 20. Audit
# ==============================================================================
# Question answered here: which documents made this batch, and what will this blend do?
#
#   trace(k)              a sample          ->  its spans: which tokens of which documents it holds
#   find(sequence)        a sequence        ->  the samples that hold tokens of it
#   explain(step)         a training step   ->  the samples of all ranks, and the spans of each
#   plan(config, sizes)   a config          ->  what the builder would build
#   verify_cache(path)    files of a cache  ->  whether they are what was written
#
# The first three follow from the orders of section 4, and read no token.  trace() goes down this
# table, as GPTDataset.pieces() does, and find() goes up:
#
#   array            trace() goes from        to                        find() goes back by
#   shuffle_index    sample k                 sample j of the stream    its inverse, made once
#   sample_index     sample j of the stream   positions d .. d'         binary search
#   document_index   positions d .. d'        sequences                 a sorted copy, made once
#
# plan() runs the builder of section 7 with datasets that have a length and no arrays.  So it reads
# the lengths of the documents alone, and has the builder's own blends, phases and errors.


class Span(typing.NamedTuple):
    """A run of tokens of one sequence in one sample.  Offsets and lengths are in tokens."""

    path_prefix: str | None  # the pair; None for mock data
    sequence: int  # the number of the sequence in the pair
    document: int  # the document of the pair that the sequence belongs to
    offset: int  # where the run begins in the sequence
    length: int  # how many tokens it has
    byte_offset: int | None  # where it begins in the .bin file, in bytes; None without a file
    sample_offset: int  # where it begins in the sample


def trace_sample(dataset: GPTDataset, k: int) -> list[Span]:
    """Return the spans of sample k, in order: its S + x tokens, or fewer if it is padded.

    A subclass that changes tokens when it reads them is traced to the tokens before the change.
    Cost: that of dataset.pieces(k), and a binary search for each span; no token is read.

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus()], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> sizes = [3, 0, 0]
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
    >>> train, valid, test = builder.build()
    >>> for span in train.trace(0):                     # b b b c c: all of bbb, and two c
    ...     print(span.sequence, span.offset, span.length, span.byte_offset, span.sample_offset)
    1 0 3 4 0
    2 0 2 7 3
    >>> train.find(2)                                   # the samples that hold tokens of cccccc
    [0, 1]
    """
    spans = []
    sample_offset = 0
    for sequence, offset, length in dataset.pieces(k):
        if length > 0:
            document, byte_offset = _place_in_pair(dataset.dataset, sequence, offset)
            place = sequence, document, offset, length, byte_offset, sample_offset
            spans.append(Span(dataset.dataset_path, *place))
            sample_offset += length
    return spans


def _place_in_pair(pair, sequence, offset):
    """The document of a sequence, and the byte of the .bin at which its token offset is.

    A reader of the user's own, as that of mock data, has neither: there a sequence is a document.
    """
    if not isinstance(pair, IndexedDataset):
        return sequence, None
    # A document without sequences begins where the next one begins: the last one has the sequence.
    document = int(np.searchsorted(pair.document_indices, sequence, side="right")) - 1
    token_bytes = DType.size(pair.dtype)
    return document, int(pair.sequence_pointers[sequence]) + offset * token_bytes


class SampleFinder:
    """Finds the samples of a dataset that hold tokens of a sequence; GPTDataset.find() has one.

    Cost: to make, a sort of document_index and an inversion of shuffle_index (10 million documents:
    a third of a second), 8 bytes for each document of all epochs and 4 or 8 for each sample.  To
    find, a few binary searches for each epoch, and the samples that are found.
    """

    def __init__(self, dataset: GPTDataset) -> None:
        self._dataset = dataset
        # One number for each entry of document_index, sequence * size + position.  When they are
        # sorted, those of a sequence are neighbours: binary search finds the first and the last.
        self._size = len(dataset.document_index)
        if self._size > 2**32:
            raise ValueError(f"find() knows up to 2**32 places of documents, not {self._size}")
        self._places = dataset.document_index.astype(np.int64)
        self._places *= self._size
        self._places += np.arange(self._size)
        self._places.sort()
        # where each sample of the stream is in the shuffled order
        shuffle_index = dataset.shuffle_index
        self._numbers = np.empty_like(shuffle_index)
        self._numbers[shuffle_index] = np.arange(len(shuffle_index), dtype=shuffle_index.dtype)

    def find(self, sequence: int) -> list[int]:
        """Return the samples that hold a token of this sequence of the pair, in order."""
        i = _position(sequence, len(self._dataset.dataset), f"{_name(self._dataset)}, its pair")
        begin, end = np.searchsorted(self._places, [i * self._size, (i + 1) * self._size])
        found = set()
        for place in self._places[begin:end].tolist():
            for j in self._samples_of_position(place - i * self._size, i):
                found.add(int(self._numbers[j]))
        # a subclass may have a smaller len()
        return sorted(k for k in found if k < len(self._dataset))

    def _samples_of_position(self, d, i):
        """The samples of the stream that hold a token of sequence i at position d of the stream."""
        sample_index = self._dataset.sample_index
        starts = sample_index[:, 0]  # the positions at which samples start, in order
        num_samples = len(sample_index) - 1
        # Those that start at d may hold its tokens, and the last one that starts before d.
        first = max(0, bisect.bisect_left(starts, d) - 1)
        end = min(bisect.bisect_right(starts, d), num_samples)
        samples = []
        for j in range(first, end):
            part_begin, part_end = self._dataset._part(sample_index[j : j + 2].tolist(), d, i)
            if part_begin < part_end:
                samples.append(j)
        return samples


class ExplainedSample(typing.NamedTuple):
    """A sample of a global batch; see explain()."""

    data_parallel_rank: int
    micro_batch: int  # counted from 0 in the step
    sample: int | None  # of the dataset; None is padding
    spans: list[Span]  # none for padding


def explain(
    dataset: typing.Any,
    step: int,
    *,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int = 1,
    consumed_samples: int = 0,
    dataloader_type: str = "single",
    data_sharding: bool = True,
    full_validation: bool = False,
    drop_last: bool = True,
    seed: int = 0,
) -> list[ExplainedSample]:
    """Return what the loaders of all data-parallel ranks give in one step of training.

    step               0 is the first step after consumed_samples
    global_batch_size  samples in a step, of all ranks: a whole number of rounds (section 8)
    consumed_samples   samples that were consumed before step 0, also by steps of another size
    the others         as for build_pretraining_data_loader()
    Returns            one entry for each sample, rank by rank, each rank's in the order of reading;
                       fewer than global_batch_size where the order ends in this step
    Raises             ValueError if the run has no such step
    Cost               O(global_batch_size) spans; "cyclic" draws, for each rank, the order of an
                       epoch.  No token is read.

    >>> dataset = BlendedMegatronDatasetBuilder(
    ...     GPTDataset, [6, 0, 0], lambda: True,
    ...     GPTDatasetConfig(1234, 4, blend=([toy_corpus()], None), split="1",
    ...                      tokenizer=ByteTokenizer(), create_attention_mask=False)).build()[0]
    >>> layout = dict(global_batch_size=2, micro_batch_size=1, data_parallel_size=2)
    >>> for rank, micro_batch, sample, spans in explain(dataset, 1, **layout):
    ...     print(rank, micro_batch, sample, [(span.sequence, span.length) for span in spans])
    0 0 2 [(2, 3), (0, 2)]
    1 0 3 [(1, 1), (2, 4)]
    """
    if step < 0 or data_parallel_size < 1:
        raise ValueError(
            f"wanted step >= 0 and data_parallel_size >= 1, got {step} and {data_parallel_size}"
        )
    begin = consumed_samples + step * global_batch_size
    if dataloader_type == "single" and not 0 <= begin < len(dataset):
        raise ValueError(f"step {step} begins at sample {begin} of {len(dataset)}: no such step")
    explained = []
    for rank in range(data_parallel_size):
        loader = build_pretraining_data_loader(
            dataset,
            begin,
            micro_batch_size=micro_batch_size,
            data_parallel_rank=rank,
            data_parallel_size=data_parallel_size,
            dataloader_type=dataloader_type,
            data_sharding=data_sharding,
            full_validation=full_validation,
            drop_last=drop_last,
            seed=seed,
        )
        explained += _explain_rank(dataset, rank, _sampler_of(loader), global_batch_size)
    if len(explained) == 0:
        raise ValueError(f"step {step} begins at sample {begin}: what is left fills no round")
    return explained


def _sampler_of(loader):
    """The sampler of a loader of section 14; ValueError for an external one."""
    sampler = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, _Sampler):
        raise ValueError("only steps of the samplers single, cyclic and full_validation are known")
    return sampler


def _explain_rank(dataset, rank, sampler, global_batch_size):
    """What one rank reads in a step that begins where its sampler stands."""
    num_micro_batches, rest = divmod(global_batch_size, sampler.samples_per_round)
    if rest or global_batch_size < 1:
        raise ValueError(
            f"global_batch_size: wanted a multiple of the round of {sampler.samples_per_round} "
            f"samples, got {global_batch_size}"
        )
    batches = sampler
    if sampler.kind == "cyclic":
        batches = cyclic_iter(sampler)  # the step may go on in the next epoch
    explained = []
    for micro_batch, samples in enumerate(itertools.islice(batches, num_micro_batches)):
        for k in samples:
            spans = [] if k is None else dataset.trace(k)
            explained.append(ExplainedSample(rank, micro_batch, k, spans))
    return explained


# -- plan() ------------------------------------------------------------------------------------


class PlannedDataset(GPTDataset):
    """A GPTDataset that has a length, and no arrays: plan() has the builder build these.

    epoch_tokens   T
    epoch_plan     EpochPlan
    """

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> typing.Any:
        """Open the pair at dataset_path without a check of the whole .idx, or mock data."""
        if config.mock:
            return MockGPTDataset.build_low_level_dataset(dataset_path, config)
        storage = ObjectStorageConfig(config.object_storage_cache_path)
        return IndexedDataset(dataset_path, False, config.mmap_bin_files, storage, check=False)

    def _open_indices(self):
        """Count the samples, instead of making the arrays."""
        self.epoch_tokens = self.tokens_per_epoch()
        self.epoch_plan = self._plan_epochs(self.epoch_tokens)

    def _warn_if_no_eod(self):
        """Read no tokens: what the tokenizer lacks is noted by plan()."""

    def __len__(self) -> int:
        return self.epoch_plan.num_samples

    def most_repeats(self, samples_drawn: int) -> int:
        """Return how many epochs the first samples_drawn samples are from.

        So often does a run read a document at most.
        """
        if samples_drawn == 0:
            return 0
        epochs = self.epoch_plan
        if self.config.stable_order:
            S = self.config.sequence_length
            ends = count_samples_of_epochs(epochs, self.epoch_tokens, S, self._extra)
            return bisect.bisect_left(ends, samples_drawn)
        if epochs.separate_final_epoch and samples_drawn <= epochs.samples_before_final_epoch:
            return epochs.num_epochs - 1
        return epochs.num_epochs

    def tokens_cut(self) -> int:
        """Return how many tokens at the end of the stream are in no sample."""
        tokens = self.epoch_plan.num_epochs * self.epoch_tokens
        if len(self) == 0:
            return tokens
        return max(0, tokens - len(self) * self.config.sequence_length - self._extra)

    def cache_bytes(self) -> int:
        """Return the size of the three arrays of the dataset, as files."""
        num_places = self.epoch_plan.num_epochs * len(self.indices)
        row_bytes = 2 * np.dtype(_sample_index_dtype(num_places)).itemsize
        number_bytes = np.dtype(_shuffle_index_dtype(len(self))).itemsize
        arrays = 4 * num_places + row_bytes * (len(self) + 1) + number_bytes * len(self)
        return arrays + 3 * _NPY_HEADER_BYTES

    def samples_to_a_new_order(self) -> int | None:
        """Return the nearest size at which all samples come in another order, minus this size.

        That is a number of samples which needs another number of epochs, or for which the last
        epoch is shuffled by itself and was not, or the other way round (see plan_epochs()).  None
        if the order does not depend on the number of samples.
        """
        n = self.num_samples
        if n is None or n == 0 or self.config.stable_order:
            return None
        S = self.config.sequence_length
        epochs = self.epoch_plan
        # the order changes between each of these numbers of samples and the next number
        edges = [count_samples(epochs.num_epochs * self.epoch_tokens, S, True, self._extra)]
        if epochs.num_epochs > 1:
            samples_per_epoch = (self.epoch_tokens - self._extra) // S
            before = epochs.samples_before_final_epoch
            edges += [before, before + int(0.80 * samples_per_epoch) - 1]
        changes = [edge + 1 - n if n <= edge else edge - n for edge in edges]
        return min(changes, key=abs)


_NPY_HEADER_BYTES = 128  # of a .npy file of a 1-D or 2-D array


class PlanRow(typing.NamedTuple):
    """What plan() says of one corpus in one split."""

    split: str
    path_prefix: str | None
    documents: int  # sequences of this split
    tokens: int  # in these
    samples_requested: int | None  # what the builder is to build; None: one epoch
    samples_built: int  # what it builds: whole epochs, and what a blend needs
    samples_drawn: int  # what a run of the wanted size reads
    epochs: fractions.Fraction  # S * samples_drawn / tokens
    weight_asked: float  # share of the samples of the split; 1 for a corpus alone
    weight_achieved: fractions.Fraction  # samples_drawn of the samples of the split
    most_repeats: int  # how often a document is read at most
    tokens_cut: int  # tokens at the end of the last epoch that fill no sample
    steps_per_epoch: fractions.Fraction | None  # of train: steps in which the corpus is read once


class Plan(list):
    """A list of PlanRow, one for each corpus of each split.

    notes              sentences on what may surprise
    cache_bytes        the size of all index arrays, as files, and in memory where they are mapped
    global_batch_size  as given to plan()
    """

    def __init__(
        self,
        rows: list[PlanRow],
        notes: list[str],
        cache_bytes: int,
        global_batch_size: int | None,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(rows)
        self.notes = notes
        self.cache_bytes = cache_bytes
        self.global_batch_size = global_batch_size
        self._config = config

    def steps(self, num_epochs: int) -> int:
        """Return in how many whole steps a run reads so many epochs of all corpora of train.

        One step more would begin another epoch.  Where the weights of a blend repeat some corpora
        more than others, see steps_per_epoch of each row instead.
        """
        if self.global_batch_size is None:
            raise ValueError("steps() needs the global_batch_size of plan()")
        S = self._config.sequence_length
        x = self._config.add_extra_token_to_sequence
        samples = 0
        for row in self:
            if row.split == Split.train.name:
                samples += count_samples(num_epochs * row.tokens, S, True, x)
        return samples // self.global_batch_size


def plan(
    config: GPTDatasetConfig,
    sizes: typing.Sequence[int | None],
    global_batch_size: int | None = None,
) -> Plan:
    """Return what a BlendedMegatronDatasetBuilder of GPTDatasets would build, and a run would read.

    sizes              samples wanted of train, valid and test; None: one epoch, as for the builder
    global_batch_size  samples in a step, for the numbers of steps
    Raises             what the builder raises
    Cost               opens each pair and reads the lengths of its documents; the blends are made,
                       10 bytes for each sample of them.  No token is read, and nothing is written.

    >>> prefix = toy_corpus()                                   # 3 documents, 13 tokens
    >>> config = GPTDatasetConfig(1234, 4, blend=([prefix], None), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> planned = plan(config, [6, 0, 0], global_batch_size=2)
    >>> row = planned[0]
    >>> row.samples_built, row.epochs, row.most_repeats, row.steps_per_epoch
    (6, Fraction(24, 13), 2, Fraction(13, 8))
    >>> planned.steps(1), planned.steps(2)          # 3 and 6 samples
    (1, 3)
    """
    if global_batch_size is not None and global_batch_size < 1:
        raise ValueError(f"global_batch_size must be >= 1, got {global_batch_size}")
    config = dataclasses.replace(config, path_to_cache=None)
    builder = _PlanningBuilder(PlannedDataset, sizes, _is_built_here, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        built = builder._build_splits()  # on this rank alone
    notes = [str(warning.message) for warning in caught]
    rows = []
    parts = []
    cache_bytes = 0
    for split, datasets in zip(Split, built, strict=True):
        if not isinstance(datasets, list):
            datasets = [datasets]
        for dataset in datasets:
            if dataset is not None:
                shares = _shares(dataset)
                cache_bytes += _cache_bytes(dataset)
                parts += [part for part, _, _ in shares]
                rows += _plan_rows(split, shares, global_batch_size)
    notes += _notes_of_config(config)
    for row, part in zip(rows, parts, strict=True):
        notes += _notes_of_row(row, part)
    notes += builder.notes
    notes += _notes_of_splits(config, rows, parts, global_batch_size)
    notes = list(dict.fromkeys(notes))  # each sentence once
    return Plan(rows, notes, cache_bytes, global_batch_size, config)


class _PlanningBuilder(BlendedMegatronDatasetBuilder):
    """The builder, which notes where a blend has a corpus built again, larger."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.notes = []

    def _blend_exactly(self, parts, weights, size, phases=None):
        first_parts = list(parts)
        blend = super()._blend_exactly(parts, weights, size, phases)
        for first, part in zip(first_parts, parts, strict=True):
            if part is not first:
                self.notes.append(
                    f"{part.index_split.name} of {_name(part)}: the blend takes "
                    f"{part.num_samples:,} samples, and weight and surplus give {len(first):,}: "
                    "the corpus is built again, larger (Megatron-LM fails in the middle of the run)"
                )
        return blend


def _shares(dataset):
    """[(part, samples drawn of it, share asked for), ...] of a blend, or of a dataset alone."""
    if not isinstance(dataset, BlendedDataset):
        drawn = len(dataset) if dataset.num_samples is None else dataset.num_samples
        return [(dataset, drawn, 1.0)]
    taken = dataset.samples_taken().tolist()
    if dataset.phases is None:
        weights = normalize(dataset.weights)
    else:
        weights = np.zeros(len(taken))
        for samples, weights_of_phase in dataset.phases:
            share_of_phase = 1.0  # without any sample there is one phase
            if dataset.size > 0:
                share_of_phase = samples / dataset.size
            weights += np.multiply(weights_of_phase, share_of_phase)
        weights = weights.tolist()
    return list(zip(dataset.datasets, taken, weights, strict=True))


def _cache_bytes(dataset):
    """The size of the arrays of a dataset, or of a blend and its parts."""
    if not isinstance(dataset, BlendedDataset):
        return dataset.cache_bytes()
    arrays = dataset.dataset_index.nbytes + dataset.dataset_sample_index.nbytes
    of_parts = sum(part.cache_bytes() for part in dataset.datasets)
    return arrays + 2 * _NPY_HEADER_BYTES + of_parts


def _plan_rows(split, shares, global_batch_size):
    """The rows of one dataset: of the parts of a blend, or of the dataset itself."""
    all_drawn = sum(drawn for _, drawn, _ in shares)
    rows = []
    for part, drawn, weight_asked in shares:
        epochs = fractions.Fraction(0)
        achieved = fractions.Fraction(0)
        steps_per_epoch = None
        if drawn:
            tokens_drawn = drawn * part.config.sequence_length
            epochs = fractions.Fraction(tokens_drawn, part.epoch_tokens)
            achieved = fractions.Fraction(drawn, all_drawn)
            if global_batch_size is not None and split is Split.train:
                steps_per_epoch = fractions.Fraction(all_drawn, global_batch_size) / epochs
        rows.append(
            PlanRow(
                split=split.name,
                path_prefix=part.dataset_path,
                documents=len(part.indices),
                tokens=part.epoch_tokens,
                samples_requested=part.num_samples,
                samples_built=len(part),
                samples_drawn=drawn,
                epochs=epochs,
                weight_asked=weight_asked,
                weight_achieved=achieved,
                most_repeats=part.most_repeats(drawn),
                tokens_cut=part.tokens_cut(),
                steps_per_epoch=steps_per_epoch,
            )
        )
    return rows


_MANY_EPOCHS = 4  # repeating data more often than this is known to teach a model less and less
_NEAR = 0.01  # by this share more or fewer samples a run may well be planned anew
_MUCH = 0.05  # from this share on, a difference is worth a note


def _notes_of_config(config):
    """Sentences on settings that find nothing, or too much, in the data."""
    notes = []
    tokenizer = config.tokenizer
    wants_eod = config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss
    if wants_eod and _attribute(tokenizer, "eod") is None:
        notes.append(
            "reset_position_ids, reset_attention_mask and eod_mask_loss look for eod, and the "
            "tokenizer has none: they find nothing"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the builder's warnings are noted already
        pad = _pad_token_id(config)
    if pad >= 0:
        notes.append(
            f"padding has the id {pad}: real tokens of this id become 0, and have no loss; "
            "see that the corpus has none"
        )
    return notes


def _notes_of_row(row, part):
    """Sentences on one corpus of one split."""
    name = f"{row.split} of {_name(part)}"
    notes = []
    if row.samples_built == 0 and row.samples_requested != 0:
        notes.append(f"{name}: its {row.tokens:,} tokens are too few for one sample")
    elif row.samples_drawn and row.tokens_cut > _MUCH * row.tokens:
        share = row.tokens_cut / row.tokens
        notes.append(
            f"{name}: {row.tokens_cut:,} tokens at the end of its stream fill no sample, "
            f"{share:.1%} of an epoch"
        )
    if row.epochs > _MANY_EPOCHS:
        notes.append(
            f"{name}: read {float(row.epochs):.1f} times: more than {_MANY_EPOCHS} times is "
            "worth less and less"
        )
    change = part.samples_to_a_new_order()
    if change is not None and abs(change) <= max(1, _NEAR * part.num_samples):
        notes.append(
            f"{name}: for {part.num_samples + change:,} samples instead of {part.num_samples:,} "
            "all of its samples would be shuffled anew, from the first one on: set stable_order if "
            "the run may become longer or shorter"
        )
    difference = abs(float(row.weight_achieved) - row.weight_asked)
    is_wanted = row.samples_requested or row.samples_drawn
    if is_wanted and difference > _MUCH * row.weight_asked:
        notes.append(
            f"{name}: a weight of {row.weight_asked:.4g} cannot be met with so few samples: "
            f"{row.samples_drawn:,} are drawn, {float(row.weight_achieved):.4g} of all"
        )
    return notes


def _epochs_of_pile(part):
    """How many epochs are shuffled together, the last one left out where it is by itself."""
    return part.epoch_plan.num_epochs - int(part.epoch_plan.separate_final_epoch)


class _OrderOfDocuments(typing.NamedTuple):
    """Corpora for which this is equal have their documents in the same order, with one seed."""

    split: str
    documents: int
    num_epochs: int | None  # None with stable_order, which shuffles each epoch by itself
    separate_final_epoch: bool | None


def _notes_of_splits(config, rows, parts, global_batch_size):
    """Sentences on several corpora of a split together."""
    notes = []
    same_order = {}
    piles = {}
    samples_of_train = 0
    for row, part in zip(rows, parts, strict=True):
        if row.split == Split.train.name:
            samples_of_train += row.samples_drawn
        if row.documents < 2 or row.samples_drawn == 0:
            continue
        order = _OrderOfDocuments(row.split, row.documents, None, None)
        if not config.stable_order:
            epochs = part.epoch_plan
            order = order._replace(
                num_epochs=epochs.num_epochs, separate_final_epoch=epochs.separate_final_epoch
            )
            if _epochs_of_pile(part) > 1:
                piles.setdefault(row.split, []).append(_name(part))
        same_order.setdefault(order, []).append(_name(part))
    for split, names in piles.items():
        notes.append(
            f"{split}: several epochs of {_list_names(names)} are shuffled as one pile: some "
            "documents come several times before others come once (stable_order shuffles each "
            "epoch by itself)"
        )
    for order, names in same_order.items():
        if len(names) > 1:
            notes.append(
                f"{order.split}: {_list_names(names)} have {order.documents:,} documents each, so "
                "with one seed these come in the same order in each of them"
            )
    if global_batch_size is not None and samples_of_train % global_batch_size:
        rest = _count(samples_of_train % global_batch_size, "sample")
        notes.append(
            f"train: {_count(samples_of_train, 'sample')} fill steps of {global_batch_size:,}, but "
            f"for the last {rest}"
        )
    return notes


def _list_names(names):
    """The first names of a list, and how many more there are."""
    text = ", ".join(names[:4])
    return text if len(names) <= 4 else f"{text} and {len(names) - 4} more"


# -- verify_cache() ----------------------------------------------------------------------------

_CACHE_FILE = r"([0-9a-f]{32}-\w+-(?:train|valid|test))-(\w+\.(?:npy|json|txt))"


def verify_cache(path: str | os.PathLike) -> dict[str, dict[str, tuple]]:
    """Check all index caches of a folder, or the one that a file belongs to.

    Each needs a manifest, arrays of the sizes and CRCs in the manifest and of shapes that fit each
    other, and a description that fits the name of the files.  Whether the corpus is still the one
    that the arrays were made from is checked where a dataset opens its cache.

    Returns   {what the names of its files begin with: {array: shape}} of each cache
    Raises    DatasetFormatError that names the file; FileNotFoundError if there is no cache
    Cost      all files are read once, at about a GiB in a second
    """
    path = pathlib.Path(path)
    files = list(path.glob("*"))
    folder = path
    if path.is_file():
        files = [path]
        folder = path.parent
    stems = set()
    for file in files:
        match = re.fullmatch(_CACHE_FILE, file.name)
        if match is not None:
            stems.add(match[1])
    if not stems:
        raise FileNotFoundError(f"{path}: no index cache, and no file of one")
    return {stem: _verify_files_of_cache(folder, stem) for stem in sorted(stems)}


def _verify_files_of_cache(folder, stem):
    """The shapes of the arrays of one cache, or the DatasetFormatError that says what is wrong."""
    manifest_path = folder / f"{stem}-manifest.json"
    if not manifest_path.exists():
        raise DatasetFormatError(
            f"{manifest_path}: no such file: the cache is upstream's, or its making was cut off; "
            "it will be built anew"
        )
    try:
        description_path = folder / f"{stem}-description.txt"
        if not stem.startswith(_md5(description_path.read_bytes())):
            raise DatasetFormatError(f"{description_path}: not the text that the name stands for")
        noted_files = json.loads(manifest_path.read_text("utf-8"))["files"]
        shapes = {}
        for name, noted in noted_files.items():
            array_path = folder / f"{stem}-{name}.npy"
            found = _describe_file(array_path)
            if found != noted:
                raise _format_error(array_path, "size and CRC", noted, found)
            shapes[name] = _map_npy(array_path).shape
        _check_shapes(folder / stem, shapes)
    except DatasetFormatError:
        raise
    except _FAULTS as error:
        raise DatasetFormatError(f"{folder / stem}: {type(error).__name__}: {error}") from error
    return shapes


def _check_shapes(name, shapes):
    """The arrays of a dataset, or of a blend, have the shapes of section 5, or of section 6."""
    if "shuffle_index" in shapes:
        (num_samples,) = shapes["shuffle_index"]
        fits = shapes["sample_index"] == (num_samples + 1, 2)
        fits = fits and len(shapes["document_index"]) == 1
    else:
        (num_samples,) = shapes["dataset_index"]
        fits = shapes["dataset_sample_index"] == (num_samples,)
    if not fits:
        raise DatasetFormatError(f"{name}: the shapes of its arrays do not fit: {shapes}")


# ==============================================================================
# 21. The command line
# ==============================================================================
# Question answered here: how is all this run from a shell?
#
#   megatron-min preprocess --input 'books/*.jsonl' --output-prefix books --append-eod --workers 8
#   megatron-min merge      --input books_text_document wiki_text_document --output-prefix all
#   megatron-min inspect    all --tokenizer tokenizer.json
#   megatron-min verify     all
#   megatron-min build      --blend 70 books 30 wiki --split 98,1,1 --sizes 1000000 1000 1000
#                           --sequence-length 2048 --random-seed 1234 --path-to-cache cache
#   megatron-min plan       --config run.toml --global-batch-size 512
#   megatron-min trace      --config run.toml --step 31000 --global-batch-size 512 --decode
#   megatron-min find       --config run.toml --path-prefix books --sequence 12
#   megatron-min demo
#
# plan, trace, find and build read the same options, from the command line or from a TOML file.
#
#   how a command ends                              exit code
#   well                                            0
#   an error: one sentence on stderr                1
#   a flag that argparse does not accept            2
#   Ctrl-C (SIGINT)                                 130
#   SIGTERM, as a cluster sends before it kills     143
#
# In all these cases the with blocks unwind: temporary files and workers go with the command.


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code; codes 2 and 143 come as SystemExit.

    argv   the words after the name of the program; None: those of this process
    """
    options = _make_parser().parse_args(argv)
    with warnings.catch_warnings(), _exit_at_sigterm():
        warnings.showwarning = _print_warning
        return _run_command(options)


def _make_parser():
    """Return the parser of all commands; each stores the function that runs it as options.run."""
    description = __doc__.partition("\n")[0]
    parser = argparse.ArgumentParser(
        _program_name(),
        description=description,
        epilog=f"{_program_name()} COMMAND --help shows the options of a command, and an example.",
    )
    version = f"{__version__} ({_describe_kernels()})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_preprocess(commands)
    _add_merge(commands)
    _add_inspect(commands)
    _add_verify(commands)
    _add_build(commands)
    _add_plan(commands)
    _add_trace(commands)
    _add_find(commands)
    _add_demo(commands)
    return parser


def _program_name():
    """How this program was started: also a copy of this file alone is one."""
    if os.path.basename(sys.argv[0]) == os.path.basename(__file__):
        return f"python {sys.argv[0]}"
    return "megatron-min"


def _run_command(options):
    """Run the command and return the exit code; an error becomes one sentence on stderr."""
    try:
        options.run(options)
        # A full disk is noticed here, and not when Python exits.  print() knows, unlike
        # sys.stdout.flush(), that there is no sys.stdout if a shell has closed it.
        print(end="", flush=True)
    except BrokenPipeError:
        # The reader has seen enough, as in "megatron-min demo | head -1".  Python would try to
        # write the rest when it exits, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        signal_error = _find_signal(error)
        if isinstance(signal_error, SystemExit):
            raise signal_error from None
        if isinstance(signal_error, KeyboardInterrupt):
            print("megatron-min: interrupted", file=sys.stderr)
            return 130
        print(f"megatron-min: {_one_line(error)}", file=sys.stderr)
        return 1
    return 0


def _find_signal(error):
    """What a signal has raised, if that led to this error; else None.

    A signal that comes while a pool starts a thread makes the pool raise an error of its own.
    """
    while error is not None:
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            return error
        error = error.__context__
    return None


def _one_line(error):
    """Return the message of an error on one line; an unexpected kind of error is named."""
    words = str(error).split()
    if len(words) == 0:
        return type(error).__name__
    message = hide_credentials(" ".join(words))
    if isinstance(error, (ValueError, IndexError, OSError, ImportError)):
        return message
    return f"{type(error).__name__}: {message}"


def _print_warning(message, *details):
    """Print a warning as a user wants to see it: without the line of code that it came from."""
    print(f"warning: {message}", file=sys.stderr)


@contextlib.contextmanager
def _exit_at_sigterm():
    """Let SIGTERM end the with block as an exception does, so that files are cleaned up."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python allows only the main thread to handle signals
        return
    previous = signal.signal(signal.SIGTERM, _exit_143)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _exit_143(signal_number, frame):
    """Handle SIGTERM; 143 = 128 + 15 is how a shell reports a process that SIGTERM has ended."""
    sys.exit(143)


# -- What the commands share -------------------------------------------------------------------


def _add_command(commands, name, run, help, example):
    """Add a command without options yet, and return its parser.

    run       the function that runs the command; it takes the options
    help      what the command does, in a line
    example   a command line, without the name of the program and of the command
    """
    formatter = argparse.RawDescriptionHelpFormatter  # which keeps the lines of the example
    parser = commands.add_parser(name, help=help, description=help, formatter_class=formatter)
    parser.epilog = f"example:\n  {parser.prog} {example}".rstrip()
    parser.set_defaults(run=run)
    return parser


_NEEDED = "needed, here or in --config"  # what the help says instead of a default


def _add_option(parser, flag, help, default=None, shown=None, **arguments):
    """Add --x VALUE, whose help tells its default.

    shown       the default in words, where it is not the default of argparse
    arguments   of add_argument(), such as type, nargs, choices or required
    """
    if arguments.get("required"):
        words = "required"
    elif shown == _NEEDED:
        words = _NEEDED
    else:
        words = f"default: {_default_in_words(default if shown is None else shown)}"
    parser.add_argument(flag, default=default, help=f"{help} ({words})", **arguments)


def _add_switch(parser, flag, help, default=False, shown=None):
    """Add the two flags --x and --no-x, whose help tells which of them is the default."""
    action = argparse.BooleanOptionalAction
    words = _default_in_words(default if shown is None else shown)
    parser.add_argument(flag, action=action, default=default, help=f"{help} (default: {words})")


def _default_in_words(value):
    """A default as a person would write it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(value)
    return "none" if value is None else str(value)


def _add_tokenizer_options(parser):
    """Add the options that _tokenizer_of() reads; None stands for their defaults."""
    kinds = "bytes, null:VOCAB, a tokenizer.json, its folder, or module:attribute"
    _add_option(parser, "--tokenizer", kinds, shown="bytes")
    _add_option(
        parser,
        "--eod-token",
        "text of the end-of-document token of a tokenizer.json",
        shown="<|endoftext|>, or else </s>",
    )
    special = "let a tokenizer.json add its own special tokens, such as BOS, to each text"
    _add_switch(parser, "--add-special-tokens", special, default=None, shown=False)


def _tokenizer_of(options):
    """The tokenizer that the options name."""
    name = "bytes" if options.tokenizer is None else options.tokenizer
    return build_tokenizer(name, options.eod_token, bool(options.add_special_tokens))


def _add_json_flag(parser):
    _add_switch(parser, "--json", "print JSON, for other programs")


def _whole_number(text):
    """The type of an option that is a number from 0 on."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"wanted a whole number, 0 or more, got {text}")
    return int(text)


def _pair_prefix(path):
    """The type of an argument that names a pair: a shell completes x to x.bin, which means x."""
    for extension in (".bin", ".idx"):
        if path.endswith(extension) and not IndexedDataset.exists(path):
            return path.removesuffix(extension)
    return path


def _print_counts(label, dataset):
    """Print one line about a pair."""
    words = [
        _count(len(dataset), "sequence"),
        _count(len(dataset.document_indices) - 1, "document"),
        f"{_count(dataset.num_tokens, 'token')} of {np.dtype(dataset.dtype)}",
    ]
    print(f"{hide_credentials(label)}: {', '.join(words)}")


def _largest_id(dataset):
    """The largest of at most a million tokens, which come from all over a pair; -1: no tokens."""
    largest = -1
    for i in range(0, len(dataset), _ceil_div(len(dataset), 1000)):
        count = min(int(dataset.sequence_lengths[i]), 1000)
        if count > 0:
            largest = max(largest, int(dataset.get(i, 0, count).max()))
    return largest


def _bar(share):
    """Return a share of 1 as a bar of at most 50 signs; what is not 0 has one."""
    return "#" * math.ceil(share * 50)


def _print_table(titles, rows, alignment):
    """Print rows of texts under their titles; alignment is l or r for each column."""
    widths = []
    for column, title in enumerate(titles):
        widths.append(max([len(title), *(len(row[column]) for row in rows)]))
    for row in [titles, *rows]:
        cells = []
        for cell, width, side in zip(row, widths, alignment, strict=True):
            cells.append(cell.ljust(width) if side == "l" else cell.rjust(width))
        print("  ".join(cells).rstrip())


def _shorten(path, width=32):
    """Return the end of a path that is too long for a column; None is mock data."""
    text = "mock data" if path is None else str(path)
    return text if len(text) <= width else "..." + text[3 - width :]


def _short_count(number):
    """Return a number in few places, rounded: 1,234,567 or 12,345.7M; "-" for None."""
    if number is None or number < 10**7:
        return _whole(number)
    if number < 10**11:
        return f"{number / 10**6:,.1f}M"
    return f"{number / 10**9:,.0f}G"


def _whole(number):
    """Return a number in full, 12,345,678; "-" for None."""
    return "-" if number is None else f"{number:,}"


def _print_json(value):
    """Print a value for other programs; a Fraction becomes a text such as "24/13"."""
    print(json.dumps(value, indent=2, default=str))


# -- preprocess --------------------------------------------------------------------------------


def _add_preprocess(commands):
    parser = _add_command(
        commands,
        "preprocess",
        _run_preprocess,
        "JSON lines, also compressed, and Parquet to .bin/.idx pairs",
        "--input 'books/*.jsonl.gz' --output-prefix books --append-eod --workers 8",
    )
    inputs = (
        "files, globs and URLs, read in this order: JSON lines (also .gz, .bz2, .xz, .zst) and "
        '.parquet; "-" is stdin'
    )
    _add_option(parser, "--input", inputs, nargs="+", required=True)
    _add_option(parser, "--output-prefix", "the pairs are named PREFIX_KEY_document", required=True)
    _add_tokenizer_options(parser)
    _add_switch(parser, "--split-sentences", "a sentence is a sequence; in PREFIX_KEY_sentence")
    _add_switch(parser, "--append-eod", "put an eod after each document that has tokens")
    _add_option(parser, "--json-keys", "each key becomes a pair", default=["text"], nargs="+")
    workers = "processes that tokenize; the files are the same for any number"
    _add_option(parser, "--workers", workers, default=1, type=_whole_number)
    shard = "i/n: make the i-th of n parts, from 0 on; merge makes one pair of them"
    launcher = "of torchrun or Slurm, else the whole, 0/1"
    _add_option(parser, "--shard", shard, shown=launcher, type=_parse_shard)
    on_error = "at a bad line: stop, or skip: leave it out, and count it"
    _add_option(parser, "--on-error", on_error, default="stop", choices=["stop", "skip"])
    _add_switch(parser, "--verbose", "show progress on stderr", default=True)


def _parse_shard(text):
    """The type of --shard: "3/16" -> (3, 16)."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None:
        raise argparse.ArgumentTypeError(f"wanted i/n, such as 0/16, got {text}")
    return int(numbers[1]), int(numbers[2])


def _run_preprocess(options):
    shard = options.shard
    if shard is None:
        shard = shard_of_launcher()
    prefixes = preprocess(
        options.input,
        options.output_prefix,
        _tokenizer_of(options),
        append_eod=options.append_eod,
        json_keys=options.json_keys,
        split_sentences=options.split_sentences,
        workers=options.workers,
        shard=shard,
        on_error=options.on_error,
        verbose=options.verbose,
    )
    made = list(prefixes.values())
    for prefix in made:
        _print_counts(prefix, IndexedDataset(prefix))
    if shard[1] == 1:
        return
    _print_how_to_merge(made, shard)


def _print_how_to_merge(prefixes, shard):
    """Print the commands that make one pair of the shards of each key."""
    print(f"this is shard {shard[0]}/{shard[1]}; when all {shard[1]} are made:")
    for prefix in prefixes:
        whole = prefix.removesuffix(_shard_name(shard))
        quoted = shlex.quote(whole)
        shards = f"{quoted}_*_of_{shard[1]:05}.idx"  # the * is for the shell
        print(f"{_program_name()} merge --input {shards} --output-prefix {quoted}")


# -- merge, inspect, verify --------------------------------------------------------------------


def _add_merge(commands):
    parser = _add_command(
        commands,
        "merge",
        _run_merge,
        "append pairs into a new pair",
        "--input books_text_document wiki_text_document --output-prefix all",
    )
    inputs = "path prefixes of pairs of one dtype, in the order in which they are appended"
    _add_option(parser, "--input", inputs, nargs="+", type=_pair_prefix, required=True)
    _add_option(parser, "--output-prefix", "path prefix of the new pair", required=True)
    _add_switch(parser, "--multimodal", "the pairs hold modes")


def _run_merge(options):
    check_all_shards(options.input)
    _make_folder_of(options.output_prefix)
    merge(options.input, options.output_prefix, options.multimodal)
    _print_counts(options.output_prefix, IndexedDataset(options.output_prefix))


def _add_inspect(commands):
    parser = _add_command(
        commands,
        "inspect",
        _run_inspect,
        "counts, lengths and first tokens of a pair",
        "books_text_document --tokenizer tokenizer.json",
    )
    parser.add_argument("prefix", type=_pair_prefix, help="path of a pair, without .bin and .idx")
    tokens = "how many tokens of sequence 0 to show"
    _add_option(parser, "--tokens", tokens, default=16, type=_whole_number)
    _add_tokenizer_options(parser)


def _run_inspect(options):
    tokenizer = _tokenizer_of(options)
    dataset = IndexedDataset(options.prefix, check=False)
    _print_counts(options.prefix, dataset)
    if len(dataset) > 0:
        _print_lengths(dataset.sequence_lengths)
        _print_first_tokens(dataset, options.tokens, tokenizer)


def _print_lengths(lengths):
    """Print how long the sequences are; percentiles of at most 100,000: there may be a billion."""
    print(f"lengths: {lengths.min():,} to {lengths.max():,} tokens")
    sample = lengths[:: _ceil_div(len(lengths), 100_000)]
    percentiles = np.percentile(sample, (1, 25, 50, 75, 99)).round().astype(int).tolist()
    note = ""
    if len(sample) < len(lengths):
        note = f", of {len(sample):,} lengths from all over the pair"
    numbers = ", ".join(f"{number:,}" for number in percentiles)
    print(f"1%, 25%, median, 75%, 99%{note}: {numbers}")
    _print_histogram(sample)


def _print_histogram(lengths):
    """Print a bar for each power of two: how many sequences have up to so many tokens."""
    counts = collections.Counter(int(length).bit_length() for length in lengths)
    rows = []
    for bits in range(min(counts), max(counts) + 1):
        lowest = (1 << bits) >> 1  # 0 bits: the length 0
        highest = (1 << bits) - 1
        share = counts[bits] / len(lengths)
        rows.append([f"{lowest:,}", f"{highest:,}", f"{share:.1%}", _bar(share)])
    _print_table(["from", "to", "share", ""], rows, "rrrl")


def _print_first_tokens(dataset, count, tokenizer):
    """Print how sequence 0 begins, as ids, and as text if they are text for the tokenizer."""
    tokens = dataset[0][:count].tolist()
    print(f"sequence 0: {tokens}")
    text = None
    largest = _largest_id(dataset)
    if largest < tokenizer.vocab_size:
        with contextlib.suppress(Exception):  # a tokenizer may raise anything for ids of another
            text = tokenizer.detokenize(tokens)
    if text is not None and _is_readable(text):
        print(f"decoded: {text!r}")
    else:
        print(
            f"not decoded: the ids, up to {largest:,}, are no text for this tokenizer of "
            f"{tokenizer.vocab_size:,} ids: name that of the pair with --tokenizer"
        )


def _is_readable(text):
    """Is this text, and not what comes of decoding the ids of another tokenizer?"""
    text = text.rstrip("\ufffd")  # where the last token is a part of a character
    return all(c.isspace() or (c.isprintable() and c != "\ufffd") for c in text)


def _add_verify(commands):
    parser = _add_command(
        commands,
        "verify",
        _run_verify,
        "check every entry of a pair, or every file of an index cache",
        "books_text_document cache --json",
    )
    parser.add_argument(
        "path",
        nargs="+",
        type=_pair_prefix,
        help="a pair, without .bin and .idx; or a cache folder, or a file of one",
    )
    _add_json_flag(parser)


def _run_verify(options):
    checked = []
    for path in options.path:
        if IndexedDataset.exists(path) or not os.path.exists(path):
            dataset = IndexedDataset(path, check=True)
            checked.append(_count_pair(path, dataset))
            if not options.json:
                _print_counts(f"whole: {path}", dataset)
            continue
        for stem, shapes in verify_cache(path).items():
            checked.append({"path": path, "cache": stem, "shapes": shapes})
            if not options.json:
                print(f"whole: {stem}")
                for name, shape in shapes.items():
                    print(f"       {name}: {' x '.join(f'{size:,}' for size in shape)}")
    if options.json:
        _print_json(checked)


def _count_pair(path, dataset):
    """What verify says of a pair, for JSON."""
    return {
        "path": path,
        "sequences": len(dataset),
        "documents": len(dataset.document_indices) - 1,
        "tokens": dataset.num_tokens,
    }


# -- the options of a run, for build, plan, trace and find ------------------------------------

# The fields of GPTDatasetConfig that can be written in a shell; tokenizer and blend have flags of
# their own.  A field becomes the flag of its name; bool stands for the two flags --x and --no-x.
_CONFIG_FLAGS = [
    ("random_seed", int, "seed of every shuffle of documents and samples"),
    ("sequence_length", int, "S, in tokens"),
    ("split", str, 'shares of train, valid and test, such as "98,1,1"'),
    ("multiple_validation_sets", bool, "valid is one dataset for each of its corpora"),
    (
        "full_validation",
        bool,
        "with --multiple-validation-sets: each valid dataset is one epoch; its size must be none",
    ),
    ("num_dataset_builder_threads", int, "how many corpora are built side by side"),
    ("path_to_cache", str, "folder of the index files"),
    ("mmap_bin_files", bool, "map the .bin files; without, read with os.pread"),
    ("mid_level_dataset_surplus", float, "share of extra samples of each corpus of a blend"),
    ("allow_ambiguous_pad_tokens", bool, "pad with the pad id even where it is eod too"),
    ("fast_cache_load", bool, "trust a cache that exists, without any check"),
    ("defer_npy_index_mmap", bool, "open the index files at the first access"),
    ("reset_position_ids", bool, "positions restart after every eod token"),
    ("reset_attention_mask", bool, "no token attends across an eod token"),
    ("eod_mask_loss", bool, "no loss where the input token is eod"),
    ("create_attention_mask", bool, "samples have the dense (1, S, S) mask"),
    ("drop_last_partial_validation_sequence", bool, "no: pad the short last sample of valid"),
    ("add_extra_token_to_sequence", bool, "the last input token has a label too"),
    ("object_storage_cache_path", str, "folder for copies of .idx files"),
    ("inter_document_masking", bool, "samples have cu_seqlens and max_seqlen, and no mask"),
    ("stable_order", bool, "a longer dataset begins with the shorter one"),
]


# How a job reads its samples.
_LAYOUT_FLAGS = [
    ("global_batch_size", int, "samples in a step, of all ranks together"),
    ("micro_batch_size", int, "samples that one rank reads at once"),
    ("data_parallel_size", int, "data-parallel ranks"),
    ("consumed_samples", int, "samples that were consumed before step 0"),
    ("dataloader_type", str, "single or cyclic"),
    ("data_sharding", bool, "of cyclic: each rank shuffles a part of its own"),
    ("drop_last", bool, "of single: leave out the samples that fill no round"),
    ("seed", int, "of cyclic"),
]

# What a file of --config may hold, and of which type: the fields of the config, and these.
_RUN_OPTIONS = {name: kind for name, kind, _ in _CONFIG_FLAGS + _LAYOUT_FLAGS}
_RUN_OPTIONS |= {"blend": list, "blend_per_split": list, "blend_phases": list, "sizes": list}
_RUN_OPTIONS |= {"train_blend": list, "valid_blend": list, "test_blend": list}
_RUN_OPTIONS |= {"tokenizer": str, "eod_token": str, "add_special_tokens": bool}


def _add_run_options(parser):
    """Add the options that say which data a run reads, and in which order.

    All of them are None where they are not given: then they may be in the file of --config.
    """
    parser.add_argument("prefix", nargs="*", type=_pair_prefix, help="the same as --blend")
    config = (
        "a TOML file with options by their names, with _ for -; those of the command line come "
        "first, and its blends make those of the file void"
    )
    _add_option(parser, "--config", config, metavar="FILE")
    sizes = "samples of train, of valid and of test; none means one epoch"
    _add_option(parser, "--sizes", sizes, nargs="+", shown="none none none; build needs it")
    blend = "path prefixes, or a weight before each: 70 books 30 wiki"
    _add_option(parser, "--blend", blend, nargs="+", type=_pair_prefix)
    for split in Split:
        blend = f"blend of whole corpora for {split.name}, instead of --blend and --split"
        _add_option(parser, f"--{split.name}-blend", blend, nargs="+", type=_pair_prefix)
    _add_option(
        parser,
        "--phase",
        "a phase of train: its samples, and a weight for each corpus; may be repeated",
        nargs="+",
        action="append",
        dest="blend_phases",
        metavar=("SAMPLES", "WEIGHT"),
    )
    _add_tokenizer_options(parser)
    defaults = {field.name: field.default for field in dataclasses.fields(GPTDatasetConfig)}
    defaults["random_seed"] = _NEEDED
    defaults["sequence_length"] = _NEEDED
    defaults["path_to_cache"] = "PREFIX/cache for a corpus; the arrays of a blend are not kept"
    _add_fields(parser, _CONFIG_FLAGS, defaults)


def _add_layout_options(parser):
    """Add the options that say how a job reads its samples."""
    defaults = {"global_batch_size": None, "micro_batch_size": 1, "data_parallel_size": 1}
    defaults |= {"consumed_samples": 0, "dataloader_type": "single", "data_sharding": True}
    defaults |= {"drop_last": True, "seed": 0}
    _add_fields(parser, _LAYOUT_FLAGS, defaults)


def _add_fields(parser, fields, defaults):
    """Add an option for each (name, type, help); bool stands for two flags, --x and --no-x."""
    for name, kind, text in fields:
        flag = "--" + name.replace("_", "-")
        if kind is bool:
            _add_switch(parser, flag, text, default=None, shown=bool(defaults[name]))
        else:
            _add_option(parser, flag, text, shown=defaults[name], type=kind)


def _add_index_split(parser):
    """Add the option that says which split a command looks at."""
    names = [split.name for split in Split]
    _add_option(parser, "--index-split", "the split to look at", default="train", choices=names)


def _read_run_options(options):
    """Fill the options that were not given with those of the file of --config."""
    if options.prefix:
        if options.blend is not None:
            raise ValueError("name the corpora once: as PREFIX or with --blend")
        options.blend = options.prefix
    if options.config is not None:
        void = _void_names(options)
        for name, value in _read_toml(options.config).items():
            if name not in void and getattr(options, name, None) is None:
                setattr(options, name, value)
    if options.prefix and options.split is None:
        warnings.warn(
            "without --split all documents count as train, as with --split 1", stacklevel=2
        )
        options.split = "1"
    for name in ("random_seed", "sequence_length"):
        if getattr(options, name) is None:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} is needed, here or as {name} in a file of --config")
    _check_layout(options)


def _void_names(options):
    """Which options of a file the blends of the command line make void."""
    per_split = [f"{split.name}_blend" for split in Split]
    if options.blend is not None:
        return ["blend_per_split", *per_split]
    if any(getattr(options, name) for name in per_split):
        return ["blend", "split", "blend_per_split"]
    return []


def _check_layout(options):
    """ValueError for a layout that no job has."""
    least = {"global_batch_size": 1, "micro_batch_size": 1, "data_parallel_size": 1}
    least["consumed_samples"] = 0
    for name, lowest in least.items():
        value = getattr(options, name, None)
        if value is not None and value < lowest:
            raise ValueError(f"{name} must be >= {lowest}, got {value}")
    kind = getattr(options, "dataloader_type", None)
    if kind not in (None, "single", "cyclic"):
        raise ValueError(f"dataloader_type must be single or cyclic, got {kind}")


def _read_toml(path):
    """Return the options of a file; ValueError that names one which is none, or of a wrong type."""
    with open(path, "rb") as file:
        try:
            values = tomllib.load(file)
        except ValueError as error:  # no TOML, or no UTF-8
            raise ValueError(f"{path}: {error}") from None
    for name, value in values.items():
        if name not in _RUN_OPTIONS:
            raise ValueError(f"{path}: {name} is no option: wanted {', '.join(_RUN_OPTIONS)}")
        kind = _RUN_OPTIONS[name]
        if type(value) is not kind and (kind is not float or type(value) is not int):
            raise ValueError(f"{path}: {name}: wanted {kind.__name__}, got {value!r}")
    return values


def _make_config(options):
    """Return the GPTDatasetConfig of the options."""
    return GPTDatasetConfig(
        blend=_parse_blend(options.blend),
        blend_per_split=_parse_blend_per_split(options),
        blend_phases=_parse_phases(options.blend_phases),
        tokenizer=_tokenizer_of(options),
        **_given_fields(options),
    )


def _parse_blend(blend):
    """A blend of the command line or of a file, as the config has it.

    ["books", "wiki"]               prefixes
    ["70", "books", "30", "wiki"]   weights and prefixes in turn
    [["books", "wiki"], [70, 30]]   in a file: prefixes, and the weights if there are any
    """
    if isinstance(blend, list) and blend and isinstance(blend[0], list):
        prefixes, *weights = blend
        return prefixes, weights[0] if weights else None
    return get_blend_from_list(blend)


def _parse_blend_per_split(options):
    """The blends of train, of valid and of test; a file may have the field of the config."""
    blends = [_parse_blend(options.train_blend)]
    blends.append(_parse_blend(options.valid_blend))
    blends.append(_parse_blend(options.test_blend))
    of_file = getattr(options, "blend_per_split", None)
    if of_file is None or any(blends):
        return blends
    return [_parse_blend(blend) if blend else None for blend in of_file]


def _parse_sizes(sizes):
    """["100", "none", ...] -> [100, None, ...]; no sizes are one epoch of each split."""
    if sizes is None:
        return [None] * len(Split)
    return [_parse_size(str(size)) for size in sizes]


def _parse_size(text):
    """Return a number of samples, or None for one epoch."""
    if text == "none":
        return None
    if not text.isdecimal():
        raise ValueError(f"--sizes: wanted a number of samples, or none for one epoch, got {text}")
    return int(text)


def _parse_phases(phases):
    """[["500", "70", "30"], ...] -> [(500, [70.0, 30.0]), ...]; None for None."""
    if phases is None:
        return None
    parsed = []
    for phase in phases:
        if not isinstance(phase, list) or len(phase) == 0:
            raise ValueError(f"blend_phases: wanted [samples, [weight, ...]], got {phase!r}")
        samples, *weights = phase
        if len(weights) == 1 and isinstance(weights[0], list):
            weights = weights[0]  # a file has (samples, weights), as the config
        samples = str(samples)
        weights = [str(weight) for weight in weights]
        values = [_number(weight) for weight in weights]
        if not samples.isdecimal() or None in values:
            given = " ".join([samples, *weights])
            raise ValueError(f"--phase: wanted a number of samples, and weights, got {given}")
        parsed.append((int(samples), values))
    return parsed


def _given_fields(options):
    """Return the fields of the config that were given; the others keep their defaults."""
    fields = {}
    for name, _, _ in _CONFIG_FLAGS:
        value = getattr(options, name)
        if value is not None:
            fields[name] = value
    return fields


def _build_datasets(options, config):
    """Build train, valid and test, as a job with these options would."""
    cls = MockGPTDataset if config.mock else GPTDataset
    sizes = _parse_sizes(options.sizes)
    return BlendedMegatronDatasetBuilder(cls, sizes, _is_built_here, config).build()


def _is_built_here():
    """Say to the builder that this process, the only one, builds the datasets."""
    return True


# -- build -------------------------------------------------------------------------------------


def _add_build(commands):
    parser = _add_command(
        commands,
        "build",
        _run_build,
        "make the index caches of a blend, for jobs that have the same tokenizer",
        "--blend 70 books_text_document 30 wiki_text_document --split 98,1,1 \\\n"
        "    --sizes 1000000 1000 1000 --sequence-length 2048 --random-seed 1234 \\\n"
        "    --tokenizer tokenizer.json --path-to-cache cache",
    )
    _add_run_options(parser)


def _run_build(options):
    _read_run_options(options)
    if options.sizes is None:
        raise ValueError("--sizes is needed, here or as sizes in a file of --config")
    config = _make_config(options)
    _warn_of_foreign_ids(config)
    for split, built in zip(Split, _build_datasets(options, config), strict=True):
        if not isinstance(built, list):  # it is a list with --multiple-validation-sets
            built = [built]
        for dataset in built:
            _print_dataset(split, dataset, config)
            _check_saved(dataset)


def _check_saved(dataset):
    """OSError if a cache could not be written: without it, the command has made nothing."""
    datasets = [dataset]
    if isinstance(dataset, BlendedDataset):
        datasets += dataset.datasets
    for built in datasets:
        if built is not None and built._cache.folder is not None and not built._cache._is_saved:
            raise OSError(f"no cache was written to {built._cache.folder}: see the warning above")


def _warn_of_foreign_ids(config):
    """Warn if a corpus was made with another tokenizer: no job would find the caches."""
    prefixes = []
    blends = [config.blend]
    if config.blend_per_split is not None:
        blends.extend(config.blend_per_split)
    for blend in blends:
        if blend is not None:
            prefixes.extend(blend[0])
    vocab_size = config.tokenizer.vocab_size
    for prefix in dict.fromkeys(prefixes):
        largest = _largest_id(IndexedDataset(prefix, check=False))
        if largest >= vocab_size:
            warnings.warn(
                f"{prefix} holds the id {largest:,}, and the tokenizer has {vocab_size:,} ids: a "
                "job with the tokenizer of the corpus does not find this cache: name that "
                "tokenizer with --tokenizer",
                stacklevel=2,
            )


def _print_dataset(split, dataset, config):
    """Print a line about a dataset that was built, and one about each of its corpora."""
    if dataset is None:
        print(f"{split.name}: none")
        return
    cache = f"cache {dataset.unique_description_hash}"
    if dataset._cache.folder is None:
        cache = "its arrays are not kept: give --path-to-cache"
    samples = _count(len(dataset), "sample")
    print(f"{split.name}: {samples} of {config.sequence_length:,} tokens, {cache}")
    if isinstance(dataset, BlendedDataset):
        for part, taken in zip(dataset.datasets, dataset.samples_taken().tolist(), strict=True):
            _print_drawn(part, taken, config)
    elif dataset.num_samples is None:
        _print_drawn(dataset, len(dataset), config)
    else:  # the run takes what it asked for, and the dataset has whole epochs
        _print_drawn(dataset, dataset.num_samples, config)


def _print_drawn(dataset, num_samples, config):
    """Print how many samples are drawn from a corpus, and how often its tokens come."""
    tokens = dataset.tokens_per_epoch()
    epochs = num_samples * config.sequence_length / max(tokens, 1)
    words = f"{epochs:,.2f} epochs"
    if 0 < epochs < 0.01:
        words = "less than 0.01 epochs"
    print(
        f"  {_name(dataset)}: {_count(num_samples, 'sample')} drawn, {words} of "
        f"{_count(tokens, 'token')}"
    )


# -- plan --------------------------------------------------------------------------------------


def _add_plan(commands):
    parser = _add_command(
        commands,
        "plan",
        _run_plan,
        "what a run will read of each corpus, before it starts",
        "--config run.toml --global-batch-size 512",
    )
    _add_run_options(parser)
    _add_layout_options(parser)
    _add_json_flag(parser)


def _run_plan(options):
    _read_run_options(options)
    config = _make_config(options)
    planned = plan(config, _parse_sizes(options.sizes), options.global_batch_size)
    if options.json:
        rows = [row._asdict() for row in planned]
        whole = {"rows": rows, "notes": planned.notes, "cache_bytes": planned.cache_bytes}
        if planned.global_batch_size is not None:
            whole["steps_of_one_epoch"] = planned.steps(1)
        _print_json(whole)
        return
    _print_samples_of_plan(planned)
    _print_epochs_of_plan(planned)
    _print_shares_of_plan(planned)
    train = [row for row in planned if row.split == Split.train.name]
    is_read_evenly = len(train) == 1 or all(row.samples_requested is None for row in train)
    if planned.global_batch_size is not None and is_read_evenly:
        print(
            f"\n1 epoch of all corpora of train: {planned.steps(1):,} whole steps of "
            f"{planned.global_batch_size:,} samples; 2 epochs: {planned.steps(2):,}"
        )
    print(f"\nindex arrays: {planned.cache_bytes / 2**20:,.1f} MiB, on disk and mapped to memory")
    for note in planned.notes:
        print(textwrap.fill(note, 100, initial_indent="note: ", subsequent_indent="      "))


def _print_samples_of_plan(planned):
    """Print what each corpus holds, and how many samples are built and drawn of it."""
    rows = []
    for row in planned:
        counts = [row.documents, row.tokens, row.samples_requested]
        counts += [row.samples_built, row.samples_drawn]
        cells = [_short_count(count) for count in counts]
        rows.append([row.split, _shorten(row.path_prefix), *cells])
    titles = ["split", "corpus", "documents", "tokens", "requested", "built", "drawn"]
    _print_table(titles, rows, "llrrrrr")


def _print_epochs_of_plan(planned):
    """Print how often each corpus is read."""
    rows = []
    for row in planned:
        steps = "-"
        if row.steps_per_epoch is not None:
            steps = f"{float(row.steps_per_epoch):,.1f}"
        cells = [f"{float(row.epochs):,.2f}", f"{row.most_repeats:,}"]
        cells += [_short_count(row.tokens_cut), steps]
        rows.append([row.split, _shorten(row.path_prefix), *cells])
    titles = ["split", "corpus", "epochs", "repeats, at most", "tokens cut", "steps in 1 epoch"]
    print()
    _print_table(titles, rows, "llrrrr")


def _print_shares_of_plan(planned):
    """Print the shares of a blend, as they are asked for and as they are achieved."""
    rows = []
    for row in planned:
        asked = row.weight_asked
        drawn = float(row.weight_achieved)
        corpus = _shorten(row.path_prefix, 24)
        rows.append([row.split, corpus, "asked", f"{asked:.2%}", _bar(asked)])
        rows.append(["", "", "drawn", f"{drawn:.2%}", _bar(drawn)])
    print()
    _print_table(["split", "corpus", "share", "", ""], rows, "lllrl")


# -- trace and find ----------------------------------------------------------------------------


def _add_trace(commands):
    parser = _add_command(
        commands,
        "trace",
        _run_trace,
        "which documents a sample, or a step, is made of; writes index caches, as build does",
        "--config run.toml --step 31 --global-batch-size 512 --draw",
    )
    _add_index_split(parser)
    wanted = parser.add_mutually_exclusive_group(required=True)
    _add_option(wanted, "--sample", "numbers of samples", type=_whole_number, nargs="+")
    step = "number of a step; needs --global-batch-size"
    _add_option(wanted, "--step", step, type=_whole_number)
    _add_switch(parser, "--decode", "print the text, too")
    _add_switch(parser, "--draw", "draw each sample as a bar")
    _add_run_options(parser)
    _add_layout_options(parser)
    _add_json_flag(parser)


def _run_trace(options):
    config, dataset = _dataset_to_audit(options)
    if options.step is None:
        explained = [ExplainedSample(None, None, k, dataset.trace(k)) for k in options.sample]
    else:
        explained = explain(dataset, options.step, **_layout_of(options, config))
    pairs = _pairs_of(dataset)
    if options.json:
        entries = []
        for sample in explained:
            spans = [_describe_span(span, pairs, config, options) for span in sample.spans]
            entries.append(sample._asdict() | {"spans": spans})
        _print_json(entries)
        return
    for sample in explained:
        _print_sample(sample, options)
        if sample.spans:
            if options.draw:
                _draw_sample(sample.spans, pairs, _attribute(config.tokenizer, "eod"))
            rows = [_describe_span(span, pairs, config, options) for span in sample.spans]
            _print_spans(rows)


def _dataset_to_audit(options):
    """Return the config of the options, and the dataset of one split."""
    _read_run_options(options)
    config = _make_config(options)
    if options.sizes is None and not config.stable_order:
        warnings.warn(
            "without --sizes the order is that of one epoch of each corpus: that of a run with "
            "other sizes may differ",
            stacklevel=2,
        )
    split = Split[options.index_split]
    dataset = _build_datasets(options, config)[split.value]
    if dataset is None:
        raise ValueError(f"there is no {split.name}: --split and the blends leave it out")
    if isinstance(dataset, list):
        raise ValueError(f"{split.name} is {len(dataset)} datasets: name one corpus as PREFIX")
    return config, dataset


def _layout_of(options, config):
    """Return the arguments of explain() that were given."""
    if options.global_batch_size is None:
        raise ValueError("--step needs --global-batch-size")
    layout = {"micro_batch_size": 1}
    for name, _, _ in _LAYOUT_FLAGS:
        value = getattr(options, name)
        if value is not None:
            layout[name] = value
    if options.index_split == Split.valid.name and config.full_validation:
        layout["full_validation"] = True
    return layout


def _pairs_of(dataset):
    """Return the data of each corpus: {path prefix: IndexedDataset}."""
    parts = dataset.datasets if isinstance(dataset, BlendedDataset) else [dataset]
    return {part.dataset_path: part.dataset for part in parts}


def _tokens_of(span, pairs):
    """Return the tokens of a span."""
    return pairs[span.path_prefix].get(span.sequence, span.offset, span.length)


def _describe_span(span, pairs, config, options):
    """Return the fields of a span, with its text if that is wanted."""
    described = span._asdict()
    if options.decode:
        tokens = _tokens_of(span, pairs).tolist()
        described["text"] = config.tokenizer.detokenize(tokens)
    return described


def _print_sample(sample, options):
    """Print the line above the spans of a sample."""
    tokens = sum(span.length for span in sample.spans)
    name = "padding" if sample.sample is None else f"sample {sample.sample:,}"
    if sample.micro_batch is not None:
        name = f"rank {sample.data_parallel_rank}, micro-batch {sample.micro_batch}: {name}"
    counts = f"{_count(tokens, 'token')}, {_count(len(sample.spans), 'span')}"
    print(f"{name} of {options.index_split}: {counts}")


# the letters of the spans in a drawing, again from A on after Z
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _draw_sample(spans, pairs, eod):
    """Print a sample as a bar: a letter for each span, $ where an eod is."""
    tokens = np.concatenate([_tokens_of(span, pairs) for span in spans])
    begins = [span.sample_offset for span in spans]
    width = min(len(tokens), 96)
    signs = []
    for column in range(width):
        begin = column * len(tokens) // width
        end = (column + 1) * len(tokens) // width
        number = bisect.bisect_right(begins, begin) - 1  # the span of the first token
        sign = _LETTERS[number % len(_LETTERS)]
        if eod is not None and eod in tokens[begin:end]:
            sign = "$"
        signs.append(sign)
    print(f"  |{''.join(signs)}|")
    if len(tokens) == width:
        print("  a sign is a token; $ is an eod")
    else:
        print(f"  a sign is {len(tokens) / width:.3g} tokens; $ has an eod among them")


def _print_spans(rows):
    """Print a table of spans, with the letters of _draw_sample() in front, and then their texts."""
    titles = ["", "at", "tokens", "corpus", "sequence", "document", "offset", "byte"]
    table = []
    texts = []
    for number, row in enumerate(rows):
        letter = _LETTERS[number % len(_LETTERS)]
        counts = [row["sequence"], row["document"], row["offset"], row["byte_offset"]]
        cells = [f"  {letter}", f"{row['sample_offset']:,}", f"{row['length']:,}"]
        cells.append(_shorten(row["path_prefix"], 28))
        cells += [_whole(count) for count in counts]
        table.append(cells)
        if "text" in row:
            texts.append(f"  {letter}  {_quote(row['text'], 90)}")
    _print_table(titles, table, "lrrlrrrr")
    for text in texts:
        print(text)


def _quote(text, width):
    """Return the begin of a text on one line, in quotes."""
    quoted = repr(text)
    return quoted if len(quoted) <= width else quoted[: width - 3] + "..."


def _add_find(commands):
    parser = _add_command(
        commands,
        "find",
        _run_find,
        "which samples, or steps, hold tokens of a sequence; writes index caches, as build does",
        "--config run.toml --path-prefix books_text_document --sequence 12",
    )
    _add_index_split(parser)
    sequence = "its number in its pair"
    _add_option(parser, "--sequence", sequence, type=_whole_number, required=True)
    path_prefix = "its pair, where the blend has several"
    _add_option(parser, "--path-prefix", path_prefix, type=_pair_prefix)
    _add_run_options(parser)
    _add_layout_options(parser)
    _add_json_flag(parser)


def _run_find(options):
    _, dataset = _dataset_to_audit(options)
    prefixes = list(_pairs_of(dataset))
    prefix = options.path_prefix
    if prefix is None:
        if len(prefixes) > 1:
            raise ValueError(f"--path-prefix is needed, one of {', '.join(prefixes)}")
        prefix = prefixes[0]
    if prefix is None:  # mock data have no pair
        samples = dataset.find(options.sequence)
    else:
        samples = dataset.find(prefix, options.sequence)
    end = _end_of_run(dataset, options)
    entries = []
    for k in samples:
        tokens = 0
        for span in dataset.trace(k):
            if (span.path_prefix, span.sequence) == (prefix, options.sequence):
                tokens += span.length
        step = _step_of(k, options) if k < end else None
        entries.append({"sample": k, "tokens": tokens, "step": step})
    if options.json:
        _print_json(entries)
        return
    name = f"sequence {options.sequence:,} of {'mock data' if prefix is None else prefix}"
    count = _count(len(entries), "sample")
    print(f"{name}: tokens of it are in {count} of {options.index_split}")
    rows = []
    for entry in entries:
        rows.append([_whole(entry[key]) for key in ("sample", "tokens", "step")])
    if rows:
        _print_table(["sample", "tokens of it", "step"], rows, "rrr")
    if len(samples) > 0 and samples[-1] >= end:
        print(f"samples from {end:,} on are not read: the run of --sizes ends before them")


def _end_of_run(dataset, options):
    """How many samples a run reads: a dataset of whole epochs may have more than it asks for."""
    wanted = getattr(dataset, "num_samples", None)  # a blend has no more than that
    if wanted is None or options.dataloader_type == "cyclic":
        return len(dataset)
    return wanted


def _step_of(k, options):
    """Return the step that reads sample k, where samples are read in order; else None."""
    is_in_order = options.dataloader_type in (None, "single")
    if options.global_batch_size is None or not is_in_order:
        return None
    consumed = 0 if options.consumed_samples is None else options.consumed_samples
    if k < consumed:
        return None  # before step 0
    return (k - consumed) // options.global_batch_size


# -- demo --------------------------------------------------------------------------------------


def _add_demo(commands):
    text = "real text to blended, resumable batches, in a few seconds"
    parser = _add_command(commands, "demo", _run_demo, text, "--keep demo")
    _add_option(parser, "--keep", "a folder to work in, whose files stay", shown="a temporary one")
    texts = "take three documents through all steps instead, and print each array"
    _add_option(parser, "--explain", texts, nargs=3, metavar="TEXT")


def _run_demo(options):
    if options.keep:
        os.makedirs(options.keep, exist_ok=True)
        _run_demo_in(options.keep, options.explain)
    else:
        with tempfile.TemporaryDirectory() as folder:
            _run_demo_in(folder, options.explain)
    print("Next, your own text, a JSON object with a text on each line of a file:")
    print(f"{_program_name()} preprocess --input corpus.jsonl --output-prefix corpus --append-eod")


def _run_demo_in(folder, texts):
    """Take texts, or Python's own source, through all steps."""
    if texts is not None:
        _explain_texts(texts, folder)
        return
    text_path = _write_demo_text(folder)
    prefixes = _make_demo_pairs(folder, text_path)
    train = _build_demo_blend(prefixes)
    state, rest = _run_first_demo_steps(train)
    _resume_demo(train, state, rest)


def _write_demo_text(folder):
    """Write the modules of the standard library as JSON lines: code, and its docstrings."""
    library = pathlib.Path(os.__file__).parent
    lines = []
    for path in sorted(library.glob("*.py"))[:150]:
        code = path.read_text("utf-8", errors="replace")
        docs = "".join(re.findall('"""(.+?)"""', code, re.DOTALL))
        lines.append(json.dumps({"code": code, "docs": docs}))
    text_path = pathlib.Path(folder, "demo.jsonl")
    text_path.write_text("\n".join(lines))
    return text_path


def _make_demo_pairs(folder, text_path):
    """Make a pair of the code and a pair of the docstrings; return their path prefixes."""
    print("1. Text to pairs: Python's modules and docstrings; a token is a byte, or an end")
    output_prefix = os.path.join(folder, "demo")
    prefixes = preprocess(text_path, output_prefix, append_eod=True, json_keys=["code", "docs"])
    for prefix in prefixes.values():
        _print_counts(prefix, IndexedDataset(prefix))
    return list(prefixes.values())


def _build_demo_blend(prefixes):
    """Blend the pairs, 70 to 30; return the training set."""
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=256,
        blend=(prefixes, [70, 30]),
        split="90,5,5",
        tokenizer=ByteTokenizer(),
        create_attention_mask=False,
    )
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [600, 600, 600], _is_built_here, config)
    train, _, _ = builder.build()
    print(f"2. A blend, 70 % code: {len(train):,} samples of 256 tokens; 90 % of each pair hold")
    for dataset, taken in zip(train.datasets, train.samples_taken(), strict=True):
        tokens = dataset.tokens_per_epoch()
        print(f"   ({tokens:,} - 1) // 256 = {len(dataset):,} samples, {taken:,} taken")
    return train


def _run_first_demo_steps(train):
    """Take five steps on two ranks; return the state of the loaders, and the steps that follow."""
    loaders = _make_demo_loaders(train, num_ranks=2)
    steps = _global_batches(loaders)
    first_step = next(steps)
    for _ in range(4):
        next(steps)
    text = ByteTokenizer().detokenize(first_step[0])
    print(f"3. Batches: 2 ranks x 4 samples, first {text[:32]!r}, stopped after 5 steps")
    return loaders[0].state_dict(), steps


def _resume_demo(train, state, rest):
    """Go on from the state on four ranks, and compare with the rest of the steps on two ranks."""
    loaders = _make_demo_loaders(train, num_ranks=4)
    for loader in loaders:
        loader.load_state_dict(state)
    equal = []
    for resumed, wanted in zip(_global_batches(loaders), rest, strict=True):
        equal.append(torch.equal(resumed, wanted))
    print(f"4. Resumed: 4 ranks x 2 samples, {len(equal)} more steps, equal: {all(equal)}")


def _make_demo_loaders(train, num_ranks):
    """Return the loader of each rank; a step is 8 samples, on however many ranks."""
    loaders = []
    for rank in range(num_ranks):
        loader = build_pretraining_data_loader(
            train,
            0,
            micro_batch_size=8 // num_ranks,
            data_parallel_rank=rank,
            data_parallel_size=num_ranks,
        )
        loaders.append(loader)
    return loaders


def _global_batches(loaders):
    """Yield the tokens that all ranks read in each step, (8, S)."""
    for batches in zip(*loaders, strict=True):
        yield torch.cat([batch["tokens"] for batch in batches])


_SHORT = 4  # S of demo --explain


def _explain_texts(texts, folder):
    """Print each array on the way from three texts to the batches of two ranks."""
    tokenizer = ByteTokenizer()
    prefix = os.path.join(folder, "explained")
    print("1. Text to tokens: a byte is a token, and 256 is eod")
    with IndexedDatasetBuilder(get_bin_path(prefix), np.uint16) as builder:
        for text in texts:
            tokens = []
            for sequence in encode_document(text, tokenizer, append_eod=True):
                tokens += sequence
            _print_array(_quote(text, 17), tokens)
            builder.add_document(tokens, [len(tokens)] if tokens else [])
    pair = IndexedDataset(prefix)
    _explain_pair(pair)
    train = _explain_orders(prefix, tokenizer)
    _explain_samples(train)
    _explain_batches(train)


def _print_array(name, values):
    """Print an array under its name, on lines of at most 100 columns."""
    text = f"   {name:17s} {values}"
    print(textwrap.fill(text, 100, subsequent_indent=" " * 21))


def _explain_pair(pair):
    """Print the arrays of the two files."""
    print(f"2. The pair: {pair.num_tokens} tokens of {np.dtype(pair.dtype)} in the .bin file")
    for name in ("sequence_lengths", "sequence_pointers", "document_indices"):
        _print_array(name, getattr(pair, name).tolist())


def _explain_orders(prefix, tokenizer):
    """Print the three index arrays of one epoch; return the dataset."""
    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=_SHORT,
        blend=([prefix], None),
        split="1",
        tokenizer=tokenizer,
        create_attention_mask=False,
    )
    sizes = [None, None, None]
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, _is_built_here, config).build()
    T = train.tokens_per_epoch()
    print(f"3. Three orders: ({T} - 1) // {_SHORT} = {len(train)} samples of {_SHORT} tokens")
    _print_array("document_index", train.document_index.tolist())
    _print_array("sample_index", train.sample_index.tolist())
    _print_array("shuffle_index", train.shuffle_index.tolist())
    return train


def _explain_samples(train):
    """Print the pieces, inputs and labels of each sample."""
    print("4. Samples: pieces (sequence, offset, length), then what the model reads and predicts")
    for k in range(len(train)):
        sample = train[k]
        _print_array(f"sample {k}", train.pieces(k))
        print(f"      tokens {sample['tokens'].tolist()}   labels {sample['labels'].tolist()}")


def _explain_batches(train):
    """Print the first batch of two ranks."""
    print("5. The first batch of two ranks, one sample each")
    if len(train) == 0:
        print(f"   none: the texts have less than {_SHORT + 1} tokens")
        return
    layout = {"global_batch_size": 2, "micro_batch_size": 1, "data_parallel_size": 2}
    for rank, _, k, spans in explain(train, 0, drop_last=False, **layout):
        if k is None:
            print(f"   rank {rank}: padding, without loss")
            continue
        tokens = train[k]["tokens"].tolist()
        sequences = [span.sequence for span in spans]
        print(f"   rank {rank}: sample {k} = {tokens}, from documents {sequences}")


if __name__ == "__main__":
    sys.exit(main())
