#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Megatron-LM's GPT data path in one file: text to files to indices to resumable batches.

For every input on which megatron-core 0.16.1 ("upstream") works as intended, this module yields the
same bytes: the same .bin/.idx files, index arrays, cache files, samples and order of batches.  Read
it from top to bottom; each section needs only those above it.  Copied alone into a project it does
everything; _helpers.c only makes it faster, and each C kernel has its definition here, in Python.

Notation    S  tokens in a sample (sequence_length)     D  documents (sequences) in a split
            T  tokens in one epoch of a split           E  epochs over the split
            N  samples in a split                       x  1 if a sample carries one extra token
Contents    1. The file pair                  text becomes two files: tokens, and where each starts
            2. Text to tokens                 JSONL and a tokenizer become a file pair
            3. Split, blend, config           which documents, from which corpora, cut how
            4. Kernels                        the four loops that matter, and the switch to C
            5. GPTDataset and its cache       a file pair becomes samples of S tokens
            6. BlendedDataset                 several datasets become one, by weights
            7. The builder                    a config becomes train, valid and test, on every rank
            8. Samplers, loader, resume       samples become batches, on any number of ranks
            9. The command line               megatron-min, and the demo

The toy corpus of every example: three documents, aaaa bbb cccccc, and S = 4.

>>> ds = IndexedDataset(toy_corpus())
>>> [bytes(document).decode() for document in ds]
['aaaa', 'bbb', 'cccccc']
"""

# ruff: noqa: E401
import abc, argparse, array, ast, collections, concurrent.futures, contextlib, dataclasses
import datetime, enum, errno, functools, glob, gzip, hashlib, importlib, itertools, json, logging
import math, multiprocessing, numbers, operator, os, pathlib, re, secrets, shutil, signal, struct
import sys, tempfile, threading, time, warnings, weakref, zlib

import numpy as np
import torch
import torch.distributed
import torch.utils.data

__version__ = "0.1.0"

log = logging.getLogger("megatron_min")


class DatasetFormatError(ValueError):
    """A file does not hold what its format promises; the message names file, field, wanted, got."""


def _require(condition, sentence, kind=ValueError):
    """Raise kind(sentence) unless condition: for what a user can cause, under python -O too."""
    if not condition:
        raise kind(sentence)


# ==============================================================================
# 1. The file pair
# ==============================================================================
# Question answered here: where on disk are the tokens of sequence i?
#
#   corpus.bin   a a a a b b b c c c c c c      the tokens of all sequences, back to back, one dtype
#                ^       ^     ^
#   corpus.idx   0       4     7 (x item size)  sequence_pointers, in bytes
#                4       3     6                sequence_lengths, in tokens
#                0       1     2     3          document_indices: document d is the sequences
#                                               document_indices[d] .. document_indices[d + 1] - 1
#
# .idx file, all integers little-endian         n sequences, m = documents + 1
#   OFFSET      SIZE   FIELD
#   0           9      magic b"MMIDIDX\0\0"
#   9           8      version, uint64, always 1
#   17          1      dtype code of the .bin file, uint8 (class DType)
#   18          8      n, uint64
#   26          8      m, uint64                <- counts the leading 0 of document_indices
#   34          4n     sequence_lengths, int32
#   34+4n       8n     sequence_pointers, int64
#   34+12n      8m     document_indices, int64
#   34+12n+8m   n      sequence_modes, int8     <- only in multimodal files
#
# Nothing is ever half there: a file is written under another name, synced, and renamed.  Nothing is
# used after it is gone: an array that views a mapped file owns the mapping.  Nothing is believed:
#
#   checked           when                   against
#   magic .. file size, every open, O(1)     the table above; the .idx must be exactly as long as n
#                                            and m say (with or without modes)
#   first, last entry every open, O(1)       documents go from 0 to n, the last sequence ends .bin
#   all entries       .idx below 64 MiB,     lengths >= 0, each pointer the sum of the lengths
#                     verify, add_index      before it, documents never going back
#   a place           every access           the sequence for the caller, the .bin for the .idx

_MAGIC, _HEADER = b"MMIDIDX\x00\x00", struct.Struct("<9sQBQQ")
_FULL_CHECK_BELOW = 64 << 20  # bytes of .idx; reading more would slow down the start of every rank
_CHUNK = 1 << 22  # items handled at a time where an array may be larger than memory
_TRANSIENT = {errno.EINTR, errno.EAGAIN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}


class DType(enum.Enum):
    """The dtype code in an .idx header <-> the numpy dtype of the .bin file.  Upstream: DType.

    >>> DType.code_from_dtype(np.uint16), DType.dtype_from_code(4), DType.size(8)
    (8, <class 'numpy.int32'>, 2)
    """

    uint8, int8, int16, int32, int64, float64, float32, uint16 = range(1, 9)

    @classmethod
    def code_from_dtype(cls, value):
        """numpy dtype -> code; ValueError if the format has no code for it."""
        name, known = np.dtype(value).name, cls.__members__
        _require(name in known, f"no dtype code for {name}: use one of {', '.join(known)}")
        return known[name].value

    @classmethod
    def dtype_from_code(cls, value):
        """code -> numpy type; ValueError if the code is not in the table."""
        _require(value in range(1, 9), f"unknown dtype code {value}: wanted 1 to 8")
        return getattr(np, cls(value).name)

    @staticmethod
    def size(key):
        """Bytes of one token; key is a code or a dtype."""
        return np.dtype(DType.dtype_from_code(key) if isinstance(key, int) else key).itemsize

    @staticmethod
    def optimal_dtype(cardinality):
        """What upstream takes for a vocabulary of this size: uint16 below 65500, else int32."""
        return np.uint16 if cardinality is not None and cardinality < 65500 else np.int32


def get_idx_path(path_prefix):
    """"corpus" -> "corpus.idx"."""
    return f"{os.fspath(path_prefix)}.idx"


def get_bin_path(path_prefix):
    """"corpus" -> "corpus.bin"."""
    return f"{os.fspath(path_prefix)}.bin"


class _NewFile:
    """A file that appears under its name whole, or not at all.

    It is written under a random name in the same directory; commit() syncs it to the disk and
    renames it.  Left uncommitted (an exception, a dropped object, the interpreter's end) it goes.
    """

    def __init__(self, path):
        self.path = os.fspath(path)
        folder = os.path.dirname(self.path) or "."
        _require(os.path.isdir(folder), f"{folder}: no such folder", FileNotFoundError)
        self.temporary = f"{self.path}.{secrets.token_hex(8)}.tmp"
        self.file = open(self.temporary, "xb", buffering=1 << 20)
        self.discard = weakref.finalize(self, self._discard, self.file, self.temporary, os.getpid())

    @staticmethod
    def _discard(file, temporary, pid):
        """Close and remove, in the process that made the file."""
        if os.getpid() == pid:  # not in a forked child: the file is its parent's
            file.close()
            pathlib.Path(temporary).unlink(missing_ok=True)

    def sync(self):
        """Put all bytes on the disk; the name does not exist yet."""
        if not self.file.closed:
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()

    def commit(self):
        """Sync, then give the file its name, over an older one if there is one."""
        self.sync()
        os.replace(self.temporary, self.path)
        self.discard.detach()

    def __enter__(self):
        return self.file

    def __exit__(self, kind, *_):
        self.discard() if kind else self.commit()


@functools.cache
def _limits(dtype):
    """The smallest and the largest value of an integer dtype."""
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)


def _as_tokens(tensor, dtype):
    """Tensor, array or list -> 1-D array of dtype; ValueError at the first id that does not fit."""
    dtype = np.dtype(dtype)
    if getattr(tensor, "dtype", None) == dtype and tensor.ndim == 1 and tensor.flags.c_contiguous:
        return tensor
    if type(tensor) is list and dtype.kind in "iu":
        with contextlib.suppress(TypeError, OverflowError):  # the fast way, which checks ranges too
            return np.frombuffer(array.array(dtype.char, tensor), dtype)
    tokens = np.asarray(tensor).reshape(-1)
    if dtype.kind in "iu" and tokens.size and not np.can_cast(tokens.dtype, dtype):
        if tokens.dtype.kind not in "iu":
            raise ValueError(f"{dtype} tokens must be integers, got {tokens.dtype}")
        low, high = _limits(dtype)
        if int(tokens.min()) < low or int(tokens.max()) > high:
            at = int(np.argmax((tokens < low) | (tokens > high)))
            raise ValueError(f"token {tokens[at]} at position {at} does not fit {dtype} ({low} to "
                             f"{high}): choose a larger dtype")
    return np.ascontiguousarray(tokens, dtype)


class IndexedDatasetBuilder:
    """Write a .bin/.idx pair.  Upstream: IndexedDatasetBuilder; the files are equal byte for byte.

    bin_path     where the tokens go; they stay under a temporary name until finalize()
    dtype        of the stored tokens; an id that does not fit is refused, never wrapped
    multimodal   also store a mode (int8) for each sequence

    As a context manager it drops everything on an exception, and finalizes to the .idx beside the
    .bin if the block did not.  ValueError, before anything is written, for what does not fit.
    Cost: 4 bytes of memory a sequence, 8 a document; the tokens go to the file as they come.

    >>> prefix = os.path.join(tempfile.mkdtemp(), "pair")
    >>> with IndexedDatasetBuilder(get_bin_path(prefix), np.uint16) as builder:
    ...     builder.add_document([97, 97, 98], [2, 1])       # two sequences, one document
    ...     builder.finalize(get_idx_path(prefix))
    >>> IndexedDataset(prefix)[:], os.path.getsize(get_bin_path(prefix))
    ([array([97, 97], dtype=uint16), array([98], dtype=uint16)], 6)
    """

    def __init__(self, bin_path, dtype=np.int32, multimodal=False):
        self.dtype = DType.dtype_from_code(DType.code_from_dtype(dtype))
        self.multimodal = multimodal
        self.sequence_lengths, self.sequence_modes = array.array("i"), array.array("b")
        self.document_indices = array.array("q", [0])
        self._bin = _NewFile(bin_path)

    def add_item(self, tensor, mode=0):
        """Append one sequence (integers, any shape, flattened); end_document() closes documents."""
        tokens = _as_tokens(tensor, self.dtype)
        self.add_sequences(tokens, [len(tokens)], [mode] if self.multimodal else None, ())

    def add_document(self, tensor, lengths, modes=None):
        """Append a document: its tokens, and the lengths of its sequences, which must add up."""
        lengths = list(lengths)
        self.add_sequences(tensor, lengths, modes, (len(lengths),))

    def add_sequences(self, tensor, lengths, modes, ends):
        """Append many sequences at once; a document ends after each ends[i]-th of them."""
        self._require_open()
        tokens, shift = _as_tokens(tensor, self.dtype), len(self.sequence_lengths)
        lengths, ends = list(map(operator.index, lengths)), [shift + end for end in ends]
        for length in lengths:
            if not 0 <= length < 2**31:
                raise ValueError(f"a sequence of {length} tokens: .idx files hold 0 to {2**31 - 1}")
        if sum(lengths) != len(tokens):
            raise ValueError(f"sum(lengths) is {sum(lengths)}, but there are {len(tokens)} tokens")
        if modes is not None or self.multimodal:
            modes = [0] * len(lengths) if modes is None else list(map(operator.index, modes))
            _require(len(modes) == len(lengths) and all(-128 <= mode < 128 for mode in modes),
                     f"{len(modes)} modes for {len(lengths)} sequences, or not from -128 to 127")
            self.sequence_modes.extend(modes if self.multimodal else ())
        self._bin.file.write(tokens.data)
        self.sequence_lengths.extend(lengths)
        self.document_indices.extend(ends)

    def _require_open(self):
        _require(self._bin.discard.alive, f"{self._bin.path} is finalized: nothing can be added")

    def end_document(self):
        """End the document that the sequences added since the last end belong to."""
        self.document_indices.append(len(self.sequence_lengths))

    def add_index(self, path_prefix):
        """Append a whole pair of the same dtype: its bytes are streamed, its indices shifted."""
        source, target = get_bin_path(path_prefix), self._bin.path
        shift = len(self.sequence_lengths)
        _require(os.path.realpath(source) != os.path.realpath(target),
                 f"{source} is both input and output: choose another output prefix")
        other = IndexedDataset(path_prefix, multimodal=self.multimodal, check=True)
        _require(other.dtype == self.dtype, f"{source} holds {np.dtype(other.dtype)} tokens, "
                 f"wanted {np.dtype(self.dtype)} as in {target}")
        with open(source, "rb") as file:
            shutil.copyfileobj(file, self._bin.file, 16 << 20)
        self.sequence_lengths.frombytes(other.sequence_lengths.tobytes())
        self.document_indices.frombytes((other.document_indices[1:] + shift).tobytes())
        if self.multimodal:
            self.sequence_modes.frombytes(other.sequence_modes.tobytes())

    def finalize(self, idx_path):
        """Write the .idx and give both files their names: first .bin, then .idx, so a pair is whole
        whenever its .idx is there.  ValueError if sequences follow the last end_document()."""
        self._require_open()
        loose = len(self.sequence_lengths) - self.document_indices[-1]
        _require(not loose, f"{loose} sequences of {self._bin.path} follow the last document's "
                 "end: call end_document() before finalize()")
        lengths = np.frombuffer(self.sequence_lengths, np.int32)
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * DType.size(self.dtype)
        code, index = DType.code_from_dtype(self.dtype), _NewFile(idx_path)
        index.file.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(self.document_indices)))
        for part in (lengths, pointers, self.document_indices, self.sequence_modes):
            index.file.write(memoryview(part))
        index.sync()
        self._bin.sync()
        pathlib.Path(idx_path).unlink(missing_ok=True)  # an old one must not describe the new .bin
        self._bin.commit()
        index.commit()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None and self._bin.discard.alive:
                self.finalize(get_idx_path(self._bin.path.removesuffix(".bin")))
        finally:
            self._bin.discard()


def _want(condition, path, field, wanted, got):
    """DatasetFormatError with the four things its message always names."""
    _require(condition, f"{path}: {field}: wanted {wanted}, got {got}", DatasetFormatError)


def _map_file(path):
    """A file as a read-only uint8 array that owns its mapping; nothing is read yet."""
    if os.path.getsize(path) == 0:
        return np.empty(0, np.uint8)  # mmap refuses empty files
    return np.memmap(path, mode="r").view(np.ndarray)


def _identity(stat):
    """What changes when a file is replaced, truncated or rewritten."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _position(idx, n, of):
    """A Python index, negative ones from the end -> 0 .. n - 1; IndexError outside."""
    i = operator.index(idx)
    if not -n <= i < n:
        raise IndexError(f"index {i} of {of}, which has {n}")
    return i % n


def _retry(function, delays=(0.5, 1.0, 2.0)):
    """function(), again after a transient OSError; any other passes at once."""
    for delay in (*delays, None):
        try:
            return function()
        except OSError as error:
            if error.errno not in _TRANSIENT or delay is None:
                raise
            time.sleep(delay)


class IndexedDataset(torch.utils.data.Dataset):
    """Read a .bin/.idx pair.  Upstream: IndexedDataset.

    path_prefix   the pair's path without .bin and .idx
    multimodal    return (tokens, mode); the file must hold modes
    mmap          True: views of the mapped file, nothing copied.  False: each access reads the file
                  with os.pread, and the .bin takes up no descriptor in between.
    check         read and check the whole .idx; None: if it is below 64 MiB.  The rank that builds
                  indices always does (verify())

    ds[i] is sequence i as a 1-D array of ds.dtype, ds[a:b] a list of them.  Opening costs O(1), or
    O(n) with the check; what one can know at once, such as the sizes of both files, is always
    checked, and each access is kept inside the file.  Raises DatasetFormatError (a ValueError) when
    a file is not what it says, IndexError for a place outside of it.

    >>> ds = IndexedDataset(toy_corpus())
    >>> len(ds), ds.sequence_lengths.tolist(), ds.sequence_pointers.tolist()
    (3, [4, 3, 6], [0, 4, 7])
    >>> ds.document_indices.tolist(), bytes(ds.get(2, offset=1, length=2))
    ([0, 1, 2, 3], b'cc')
    """

    def __init__(self, path_prefix, multimodal=False, mmap=True, object_storage_config=None,
                 check=None):
        super().__init__()
        self.path_prefix, self.multimodal, self.mmap = os.fspath(path_prefix), multimodal, mmap
        self.check, self.object_storage_config = check, object_storage_config
        path, self._bin_path = get_idx_path(path_prefix), get_bin_path(path_prefix)
        index = _map_file(path)
        n, m = self._read_header(index, path)
        edges = itertools.accumulate((4 * n, 8 * n, 8 * m, n), initial=_HEADER.size)
        parts = [index[low:high] for low, high in itertools.pairwise(edges)]
        self.sequence_lengths = parts[0].view(np.int32)  # (n,) in tokens
        self.sequence_pointers = parts[1].view(np.int64)  # (n,) in bytes
        self.document_indices = parts[2].view(np.int64)  # (m,) in sequences
        self.sequence_modes = parts[3].view(np.int8) if multimodal else None  # (n,)
        self._check_ends(path)
        self._checked = False
        if check or (check is None and len(index) < _FULL_CHECK_BELOW):
            self.verify()
        self._tokens = _map_file(self._bin_path).view(self.dtype) if mmap else None

    def _read_header(self, index, path):
        """Check magic, version, dtype code and the file's size, which n and m imply -> n, m."""
        _want(len(index) >= _HEADER.size, path, "header", f"{_HEADER.size} bytes", len(index))
        magic, version, code, n, m = _HEADER.unpack(index[:_HEADER.size].tobytes())
        _want(magic == _MAGIC, path, "magic", _MAGIC, magic)
        _want(version == 1, path, "version", 1, version)
        _want(1 <= code <= 8, path, "dtype code", "1 to 8", code)
        self.dtype, self._item_size = DType.dtype_from_code(code), DType.size(code)
        plain = _HEADER.size + 12 * n + 8 * m
        sizes = [plain + n] if self.multimodal else [plain, plain + n]
        _want(len(index) in sizes, path, "file size", f"{' or '.join(map(str, sizes))} bytes for "
              f"{n} sequences and {m} document indices (without or with modes)", len(index))
        return n, m

    def _check_ends(self, path):
        """The O(1) part: do the first and last entries agree with each other and with .bin?"""
        n, documents, end = len(self), self.document_indices, 0
        ends = [int(documents[0]), int(documents[-1])] if len(documents) else []
        _want(ends == [0, n], path, "document_indices", f"from 0 to {n}", ends)
        if n:
            end = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self._item_size
        stat = _retry(lambda: os.stat(self._bin_path))
        _want(end == stat.st_size, self._bin_path, "file size",
              f"{end} bytes of {np.dtype(self.dtype)}, as {path} says",
              f"{stat.st_size}: it is truncated, or of another pair")
        self.num_tokens, self._bin_identity = end // self._item_size, _identity(stat)

    def verify(self):
        """The O(n) part, done once: no negative length, pointers their sum, documents in order."""
        path, start = get_idx_path(self.path_prefix), 0
        if self._checked:
            return
        for low in range(0, len(self), _CHUNK):
            lengths = self.sequence_lengths[low:low + _CHUNK].astype(np.int64)
            pointers = self.sequence_pointers[low:low + _CHUNK]
            ends = start + np.cumsum(lengths) * self._item_size
            due = ends - lengths * self._item_size
            at = int(np.argmax((lengths < 0) | (pointers != due)))
            row = f"[{low + at}]"
            _want(lengths[at] >= 0, path, "sequence_lengths" + row, ">= 0", lengths[at])
            _want(pointers[at] == due[at], path, "sequence_pointers" + row, due[at], pointers[at])
            start = int(ends[-1])
        for low in range(0, len(self.document_indices), _CHUNK):
            documents = self.document_indices[low:low + _CHUNK + 1]
            for at in np.flatnonzero(np.diff(documents) < 0)[:1]:
                _want(False, path, f"document_indices[{low + at + 1}]", f">= {documents[at]}",
                      documents[at + 1])
        self._checked = True

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, idx):
        if not isinstance(idx, slice):
            return self.get(idx)
        rows = range(*idx.indices(len(self)))
        _require(rows.step == 1, f"slices of a dataset must be contiguous, got step {rows.step}")
        sequences = [self._read(i, 0, int(self.sequence_lengths[i])) for i in rows]
        return (sequences, self.sequence_modes[idx]) if self.multimodal else sequences

    def get(self, idx, offset=0, length=None):
        """Tokens offset .. offset + length of sequence idx (default: to its end), 1-D, ds.dtype."""
        i = _position(idx, len(self), self.path_prefix)
        size = int(self.sequence_lengths[i])
        offset, length = int(offset), size - int(offset) if length is None else int(length)
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {i} of "
                             f"{self.path_prefix}, which has {size}")
        tokens = self._read(i, offset, length)
        return (tokens, self.sequence_modes[i]) if self.multimodal else tokens

    def _read(self, i, offset, length):
        """Tokens of a sequence that exists, from the map or the file, never from outside of it."""
        pointer = int(self.sequence_pointers[i])
        first = pointer // self._item_size + offset
        inside = 0 <= length and 0 <= first and first + length <= self.num_tokens
        if not inside or pointer % self._item_size:  # possible where the whole .idx was not checked
            _want(False, get_idx_path(self.path_prefix), f"sequence {i}", f"a place in "
                  f"{self._bin_path}", f"byte {pointer}, length {self.sequence_lengths[i]}")
        if self._tokens is not None:
            return self._tokens[first:first + length]
        return _retry(lambda: self._pread(first * self._item_size, length))

    def _pread(self, position, length):
        """Read length tokens at a byte position; an error if the file changed meanwhile."""
        tokens = np.empty(length, self.dtype)
        view, done = tokens.view(np.uint8), 0
        with open(self._bin_path, "rb", buffering=0) as file:
            now = _identity(os.fstat(file.fileno()))
            _want(now == self._bin_identity, self._bin_path, "inode, size, time",
                  self._bin_identity, f"{now}: it was rewritten after it was opened")
            while done < len(view):
                got = os.pread(file.fileno(), len(view) - done, position + done)
                _want(got, self._bin_path, f"bytes at {position}", len(view), f"{done}: short read")
                view[done:done + len(got)] = np.frombuffer(got, np.uint8)
                done += len(got)
        return tokens

    def __reduce__(self):
        """Pickled as its path: a worker process opens the files again."""
        return type(self), (self.path_prefix, self.multimodal, self.mmap,
                            self.object_storage_config, self.check)

    @staticmethod
    def exists(path_prefix):
        """True if both files of the pair are there."""
        return all(map(os.path.exists, (get_idx_path(path_prefix), get_bin_path(path_prefix))))


def merge(prefixes, output_prefix, multimodal=False):
    """Append whole pairs, in the given order, into one new pair of the same dtype.

    Equal to writing all their documents with one builder.  The output may not be an input.  Cost:
    the bytes are streamed; no Python loop over documents.  Upstream: tools/merge_datasets.py.

    >>> prefix = toy_corpus()
    >>> merge([prefix, prefix], prefix + "2")
    >>> IndexedDataset(prefix + "2").document_indices.tolist()
    [0, 1, 2, 3, 4, 5, 6]
    """
    prefixes = [prefixes] if isinstance(prefixes, (str, os.PathLike)) else list(prefixes)
    _require(prefixes, "merge wants at least one input prefix")
    dtype = IndexedDataset(prefixes[0], check=False).dtype
    with IndexedDatasetBuilder(get_bin_path(output_prefix), dtype, multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)


def toy_corpus(folder=None):
    """Write the documents of every example, aaaa bbb cccccc, in ASCII -> their path prefix."""
    prefix = os.path.join(folder or tempfile.mkdtemp(), "toy")
    with IndexedDatasetBuilder(get_bin_path(prefix), np.uint8) as builder:
        for text in (b"aaaa", b"bbb", b"cccccc"):
            builder.add_document(list(text), [len(text)])
    return prefix


# ==============================================================================
# 2. Text to tokens
# ==============================================================================
# Question answered here: how does a JSONL file become a file pair, fast, in its own order?
#
#   this process reads  ->  blocks of lines  ->  N workers: JSON, tokenizer  ->  this process writes
#
# Blocks are written in the order in which they were read, whichever worker ends first.  A blank
# line is a bad line, since it holds no JSON value.  An empty text is a document without tokens: it
# adds no sequence and no eod, only a repeated entry in document_indices (as upstream).

_BLOCK = 1 << 20  # bytes of text handed to a worker at a time


class ByteTokenizer:
    """UTF-8 bytes as tokens 0 to 255, eod 256.  Needs no files, loses nothing; about four times as
    many tokens as a trained tokenizer would make of English.

    >>> ByteTokenizer().tokenize("aaaa"), ByteTokenizer().detokenize([98, 256])
    ([97, 97, 97, 97], 'b')
    """

    vocab_size, eod = 257, 256
    unique_identifiers = {"class": "ByteTokenizer"}

    def tokenize(self, text):
        """str -> list of ids."""
        return list(text.encode())

    def detokenize(self, ids):
        """ids -> str; eods are left out, broken UTF-8 becomes the replacement character."""
        return bytes(i for i in ids if i < 256).decode(errors="replace")


class NullTokenizer:
    """Numbers separated by spaces; eod is the number after the last.  Upstream: NullTokenizer.

    >>> NullTokenizer(100).tokenize("7 0 99"), NullTokenizer(100).eod
    ([7, 0, 99], 100)
    """

    def __init__(self, vocab_size):
        _require(str(vocab_size).isdecimal(), f"null:VOCAB wants a number, got {vocab_size!r}")
        self.eod, self.vocab_size = int(vocab_size), int(vocab_size) + 1
        self.unique_identifiers = {"class": "NullTokenizer", "vocab_size": self.vocab_size}

    def tokenize(self, text):
        """str -> list of ids."""
        return [int(number) for number in text.split()]

    def detokenize(self, ids):
        """ids -> str."""
        return " ".join(map(str, ids))


class HuggingFaceTokenizer:
    """A tokenizer.json, run by the tokenizers library (extra "tools").

    eod_token   the text of the end-of-document token; default <|endoftext|>, else </s>
    """

    def __init__(self, path, eod_token=None):
        _require(os.path.isfile(path), f"{path}: no such file", FileNotFoundError)
        self._tokenizer = _extra("tokenizers", "tools").Tokenizer.from_file(path)
        self.vocab_size = self._tokenizer.get_vocab_size()
        wanted = [eod_token] if eod_token else ["<|endoftext|>", "</s>"]
        found = [i for i in map(self._tokenizer.token_to_id, wanted) if i is not None]
        _require(found, f"{path}: has no token {' or '.join(wanted)}: name the one that ends a "
                 "document with --eod-token")
        self.eod = found[0]
        self.unique_identifiers = {
            "class": "HuggingFaceTokenizer", "tokenizer.json": _md5(self._tokenizer.to_str()),
            "eod": self.eod}

    def tokenize(self, text):
        """str -> list of ids."""
        return self._tokenizer.encode(text).ids

    def tokenize_batch(self, texts):
        """list of str -> list of lists of ids, in parallel inside the library."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(texts)]

    def detokenize(self, ids):
        """ids -> str."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def _extra(module, extra):
    """Import an optional package; ImportError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs the package {module}: pip install 'megatron-min[{extra}]' "
                          f"({error})") from None


def _md5(data):
    """Hex digest of bytes or str: names things, protects nothing."""
    data = data.encode() if isinstance(data, str) else data
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def build_tokenizer(name="bytes", eod_token=None):
    """"bytes", "null:VOCAB", a tokenizer.json, or module:attribute (an object or its class)."""
    if name == "bytes":
        return ByteTokenizer()
    if name.startswith("null:"):
        return NullTokenizer(name[5:])
    if name.endswith(".json"):
        return HuggingFaceTokenizer(name, eod_token)
    module, colon, attribute = name.partition(":")
    _require(colon, f"unknown tokenizer {name!r}: wanted bytes, null:VOCAB, a tokenizer.json or "
             "module:attribute")
    sys.path.insert(0, os.getcwd())  # as python -m does: the module may lie beside the data
    try:
        found = operator.attrgetter(attribute)(importlib.import_module(module))
    finally:
        sys.path.pop(0)
    is_one = hasattr(found, "tokenize") and not isinstance(found, type)
    _require(is_one or callable(found), f"{name} is no tokenizer, and makes none")
    return found if is_one else found()


class _Encoder:
    """A worker's job: a block of JSON lines -> tokens, sequence lengths, document ends, by key.

    lines                          tokens                 lengths   ends
    {"text": "aaaa"}               a a a a $ b b b $      5 4       1  the first ends after one
    {"text": ""}       -- eod -->  (here $ is eod)                  1  sequence, so does the empty
    {"text": "bbb"}                                                 2  one
    """

    def __init__(self, tokenizer, json_keys, append_eod, skip_errors):
        self.tokenizer, self.keys, self.skip_errors = tokenizer, json_keys, skip_errors
        self.dtype = DType.optimal_dtype(tokenizer.vocab_size)
        self.eod = _as_tokens([tokenizer.eod] if append_eod else [], self.dtype)
        self.batched = callable(getattr(tokenizer, "tokenize_batch", None))

    def __call__(self, *block):
        """-> ({key: (tokens, sequence lengths, document ends)}, documents, skipped lines)"""
        if self.batched:
            with contextlib.suppress(Exception):
                return self._encode(*block, batched=True)
        return self._encode(*block, batched=False)  # line by line, so that a bad one is named

    def _encode(self, source, first_line, lines, batched):
        """A block, each line on its own or its texts together."""
        rows = []
        for number, line in enumerate(lines, first_line):
            try:
                rows.append(self._row(line, batched))
            except Exception as error:
                if not self.skip_errors:
                    raise ValueError(f"{source}: line {number}: {error} (--on-error skip leaves "
                                     "such lines out)") from None
        columns = {key: self._pack([row[at] for row in rows], batched)
                   for at, key in enumerate(self.keys)}
        return columns, len(rows), len(lines) - len(rows)

    def _row(self, line, batched):
        """A line of input -> under each key its tokens, or its text where the tokenizer takes many
        at once; ValueError says what is wrong with it."""
        _require(line.strip(), "it is blank, wanted a JSON object")
        row = json.loads(line)
        for key in self.keys:
            _require(isinstance(row, dict) and isinstance(row.get(key), str),
                     f"wanted a JSON object with text under {key!r}, got {line[:60]!r}")
        texts = [row[key] for key in self.keys]
        return texts if batched else self._tokens(map(self.tokenizer.tokenize, texts))

    def _tokens(self, documents):
        """Lists of ids -> arrays, in the dtype of the file."""
        return [_as_tokens(ids, self.dtype) for ids in documents]

    def _pack(self, documents, batched):
        """A block's documents under one key -> flat tokens, sequence lengths, document ends."""
        if batched:
            documents = self._tokens(self.tokenizer.tokenize_batch(documents))
        ends = list(itertools.accumulate(len(document) > 0 for document in documents))
        documents = [document for document in documents if len(document)]
        lengths = [len(document) + len(self.eod) for document in documents]
        pieces = [piece for document in documents for piece in (document, self.eod)]
        return np.concatenate([np.empty(0, self.dtype), *pieces]), lengths, ends


_encoder = None  # in a worker process: its _Encoder


def _start_worker(*arguments):
    """What a worker process runs first; it then keeps its tokenizer."""
    global _encoder
    parent = multiprocessing.parent_process()
    watch = threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True)
    watch.start()  # an orphan would wait for ever
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _encoder = _Encoder(*arguments)


def _work(block):
    """What a worker process runs for each block."""
    return _encoder(*block)


def _in_order(blocks, arguments, workers):
    """Encode blocks, in worker processes if workers > 1; results in the order of the blocks."""
    if workers <= 1:
        yield from itertools.starmap(_Encoder(*arguments), blocks)
        return
    # "fork" where there is one: the others would import torch again in each worker
    start = "fork" if "fork" in multiprocessing.get_all_start_methods() else None
    context, pending = multiprocessing.get_context(start), collections.deque()
    with concurrent.futures.ProcessPoolExecutor(workers, context, _start_worker, arguments) as pool:
        for block in blocks:
            pending.append(pool.submit(_work, block))
            if len(pending) > 2 * workers:  # bounded: memory stays flat however large the input
                yield pending.popleft().result()
        yield from (future.result() for future in pending)


def _expand(patterns):
    """Paths and globs (each in sorted order) -> files; FileNotFoundError for what matches none."""
    patterns = [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns
    for pattern in map(os.fspath, patterns):
        literal = pattern == "-" or os.path.exists(pattern)
        found = [pattern] if literal else sorted(glob.glob(pattern, recursive=True))
        _require(found, f"input {pattern}: no such file", FileNotFoundError)
        yield from found


def _blocks(files, progress):
    """Yield (file, number of the first line, lines) in order; gzip by the name's ending."""
    for path in files:
        with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as raw:
            text = gzip.GzipFile(fileobj=raw) if path.endswith(".gz") else raw
            number = 1
            while lines := text.readlines(_BLOCK):
                yield path, number, lines
                number += len(lines)
                progress.bytes += sum(map(len, lines)) * (text is raw)
        progress.bytes += os.path.getsize(path) if text is not raw else 0


class _Progress:
    """What was done, and a line about it on stderr every ten seconds."""

    def __init__(self, files):
        self.total = sum(os.path.getsize(path) for path in files if path != "-")
        self.start = self.last = time.monotonic()
        self.bytes = self.documents = self.skipped = 0

    def show(self, every=10):
        """Print the line, unless the last one is not so many seconds old."""
        now = time.monotonic()
        if now - self.last >= every:
            seconds, self.last = max(now - self.start, 1e-9), now
            left = max(self.total - self.bytes, 0) * seconds / max(self.bytes, 1)
            print(f"{self.documents:,} documents, {self.documents / seconds:,.0f} docs/s, "
                  f"{self.bytes / seconds / 1e6:,.1f} MB/s, {self.skipped:,} bad lines skipped, "
                  f"ETA {datetime.timedelta(seconds=round(left))}", file=sys.stderr, flush=True)


def preprocess(input, output_prefix, tokenizer=None, *, json_keys=("text",), append_eod=False,
               workers=1, on_error="stop", verbose=False):
    """JSONL files -> <output_prefix>_<key>_document.bin/.idx for each key.

    input        files and globs of .jsonl or .jsonl.gz ("-" is stdin), read in this order
    tokenizer    an object as described in section 3; default ByteTokenizer()
    append_eod   put tokenizer.eod after each document that has tokens
    workers      processes; the files are the same for any number
    on_error     "stop": ValueError with file, line and reason; "skip": count bad lines, go on
    verbose      progress on stderr: docs/s, MB/s and the time left
    Returns      {key: path prefix of its pair}; nothing appears before all of it is complete
    Upstream     tools/preprocess_data.py

    >>> folder = tempfile.mkdtemp()
    >>> path = os.path.join(folder, "toy.jsonl")
    >>> with open(path, "w") as file:
    ...     _ = file.write('{"text": "aaaa"}\\n{"text": "bbb"}\\n{"text": "cccccc"}\\n')
    >>> made = preprocess([path], os.path.join(folder, "toy"), append_eod=True)
    >>> IndexedDataset(made["text"])[:2]
    [array([ 97,  97,  97,  97, 256], dtype=uint16), array([ 98,  98,  98, 256], dtype=uint16)]
    """
    _require(on_error in ("stop", "skip"), f"on_error must be stop or skip, got {on_error!r}")
    _require(workers >= 1, f"workers must be >= 1, got {workers}")
    _require(input and json_keys, "preprocess wants at least one input and one key")
    keys = [json_keys] if isinstance(json_keys, str) else list(json_keys)
    tokenizer, files = tokenizer or ByteTokenizer(), list(_expand(input))
    dtype, progress = DType.optimal_dtype(tokenizer.vocab_size), _Progress(files)
    prefixes = {key: f"{os.fspath(output_prefix)}_{key}_document" for key in keys}
    arguments = tokenizer, keys, append_eod, on_error == "skip"
    with contextlib.ExitStack() as stack:
        builders = {key: stack.enter_context(IndexedDatasetBuilder(get_bin_path(prefix), dtype))
                    for key, prefix in prefixes.items()}
        for columns, documents, skipped in _in_order(_blocks(files, progress), arguments, workers):
            for key, (tokens, lengths, ends) in columns.items():
                builders[key].add_sequences(tokens, lengths, None, ends)
            progress.documents += documents
            progress.skipped += skipped
            progress.show(10 if verbose else math.inf)
    progress.show(0 if verbose else math.inf)
    return prefixes


# ==============================================================================
# 3. Split, blend, config
# ==============================================================================
# Question answered here: which documents of which corpora, and cut how?
#
#   split "98,1,1" of a corpus of 1000 sequences      |<------- train 0..979 ------->|valid|test|
#   blend (["p1", "p2"], [30, 70])                    of 10 samples 3 come from p1 and 7 from p2
#
# A tokenizer is any object with vocab_size, eod, perhaps pad, tokenize(text) -> ids,
# detokenize(ids) -> text, and unique_identifiers, a dict that enters the cache's key.


class Split(enum.Enum):
    """The three parts of a corpus.  Upstream: Split.

    >>> [(split.name, split.value) for split in Split]
    [('train', 0), ('valid', 1), ('test', 2)]
    """

    train, valid, test = range(3)


def normalize(weights):
    """w / sum(w) in float64, as a list.

    >>> normalize([30, 70])
    [0.3, 0.7]
    """
    weights = np.array(weights, dtype=np.float64)
    return (weights / np.sum(weights)).tolist()


def _check_weights(weights, names):
    """ValueError that names the dataset whose weight is no weight."""
    _require(len(weights) == len(names), f"{len(weights)} weights for {len(names)} datasets")
    for weight, name in zip(weights, names):
        _require(isinstance(weight, numbers.Real) and math.isfinite(weight) and weight >= 0,
                 f"weight of {name}: wanted a finite number >= 0, got {weight!r}")
    _require(sum(weights) > 0, f"all weights are 0: {', '.join(map(str, names))}")


def parse_and_normalize_split(split):
    """"99,1,0" -> [0.99, 0.01, 0.0]: train, valid, test; missing ones are 0.

    ValueError for anything but up to three non-negative numbers with a positive sum.  (Upstream
    drops signs, exponents and empty fields.)

    >>> parse_and_normalize_split("3,1")
    [0.75, 0.25, 0.0]
    """
    fields = re.split(r"\s*[,;/]\s*|\s+", str(split).strip("[]() "))
    vector = [_number(field) for field in fields]
    good = None not in vector and all(0 <= share < math.inf for share in vector)
    _require(good and len(vector) <= len(Split) and sum(vector) > 0, f"split {split!r}: wanted up "
             'to three numbers >= 0, not all 0, for train, valid and test, such as "98,1,1"')
    return normalize(vector + [0.0] * (len(Split) - len(vector)))


def _number(text):
    """What float() reads in it, or None."""
    with contextlib.suppress(ValueError):
        return float(text)


def convert_split_vector_to_split_matrix(vector_a, vector_b=None):
    """Shares -> (begin, end) of each split as fractions, None where empty.  With two vectors, the
    part of each split of b that lies in the same split of a.

    >>> convert_split_vector_to_split_matrix([0.75, 0.25, 0.0])
    [(0, 0.75), (0.75, 1.0), None]
    """
    vectors = vector_a, vector_a if vector_b is None else vector_b
    pairs = zip(*(itertools.pairwise(itertools.accumulate(v, initial=0)) for v in vectors))
    overlaps = [(max(a[0], b[0]), min(a[1], b[1])) for a, b in pairs]
    return [(low, high) if low < high else None for low, high in overlaps]


def split_range(bounds, num_sequences):
    """(begin, end) fractions of a corpus -> (first, end) sequence; Python's round, as upstream.

    >>> split_range((0, 0.75), 3), split_range((0.75, 1.0), 3)
    ((0, 2), (2, 3))
    """
    return tuple(int(round(bound * float(num_sequences))) for bound in bounds)


def get_blend_from_list(blend):
    """["30", "p1", "70", "p2"] or ["p1", "p2"] -> (prefixes, weights or None); None -> None.

    A list that is neither is a ValueError (upstream guesses); a folder whose name is a number is
    written with its path: ./2023.

    >>> get_blend_from_list(["30", "p1", "70", "p2"])
    (['p1', 'p2'], [30.0, 70.0])
    """
    if blend is None:
        return None
    blend = [str(entry).strip() for entry in blend]
    numbers = [_number(entry) is not None for entry in blend]
    if blend and not any(numbers):
        return blend, None
    _require(blend and numbers == [True, False] * (len(blend) // 2),
             f"blend {' '.join(blend)!r}: wanted prefixes, or a weight before every prefix (a "
             "folder with a numeric name is written ./2023)")
    return blend[1::2], [float(weight) for weight in blend[0::2]]


@dataclasses.dataclass
class BlendedMegatronDatasetConfig:
    """What to build.  Field names and defaults are upstream's; ValueError for bad combinations.

    random_seed                 of every shuffle of documents and samples
    sequence_length             S, in tokens
    blend                       ([prefix, ...], [weight, ...] or None), each corpus cut by split
    blend_per_split             for train, valid, test each a blend of whole corpora, or None;
                                with neither blend: mock data
    multiple_validation_sets    valid is a list of datasets, one for each of its corpora
    full_validation             valid is one epoch of each: its size must be None
    split                       shares of train, valid, test, such as "98,1,1"
    num_dataset_builder_threads corpora that are built side by side
    path_to_cache               folder of the index files; default <prefix>/cache/..., and then the
                                indices of blends are not kept
    mmap_bin_files              False: read the tokens with os.pread
    tokenizer                   see above
    mid_level_dataset_surplus   how much more of each corpus is built than a blend asks for
    allow_ambiguous_pad_tokens  pad with the tokenizer's pad id even where it is also its eod
    fast_cache_load             trust a cache that is there; look at nothing else
    defer_npy_index_mmap        open the index files at the first access
    split_matrix, mock          derived
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

    def __post_init__(self):
        lowest = dict(sequence_length=1, random_seed=0, num_dataset_builder_threads=1)
        for name, low in lowest.items():
            value = getattr(self, name)
            _require(hasattr(value, "__index__") and value >= low,
                     f"{name} must be a whole number >= {low}, got {value!r}")
            setattr(self, name, int(value))  # numpy's are no JSON
        surplus = self.mid_level_dataset_surplus
        _require(surplus >= 0, f"mid_level_dataset_surplus must be >= 0, got {surplus}")
        _require(self.random_seed < 2**32, f"random_seed must be < 2**32, got {self.random_seed}")
        per_split = self.blend_per_split if any(self.blend_per_split or []) else None
        if per_split:
            _require(self.blend is None, "give blend or blend_per_split, not both")
            _require(self.split is None, "blend_per_split takes whole corpora: leave split None")
            _require(len(per_split) == len(Split),
                     f"blend_per_split: wanted {len(Split)} entries, got {len(per_split)}")
        else:
            _require(not self.multiple_validation_sets,
                     "multiple_validation_sets needs blend_per_split")
            self.mock = self.blend is None
            self.split = "1,1,1" if self.mock else self.split
            _require(self.split is not None, 'a blend needs a split, such as "98,1,1"')
            vector = parse_and_normalize_split(self.split)
            self.split_matrix = convert_split_vector_to_split_matrix(vector)
        for blend in filter(None, [self.blend, *(per_split or [])]):
            _require(len(blend) == 2 and not isinstance(blend[0], str) and len(blend[0])
                     and all(isinstance(prefix, (str, os.PathLike)) for prefix in blend[0]),
                     f"a blend is ([prefix, ...], [weight, ...] or None), got {blend!r}")
            if blend[1] is not None:
                _check_weights(blend[1], blend[0])


@dataclasses.dataclass
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """The config of GPTDataset; on top of the base class:

    reset_position_ids       positions restart after every eod token
    reset_attention_mask     no attention across an eod token
    eod_mask_loss            no loss where the input token is eod
    create_attention_mask    return the dense (1, S, S) mask
    drop_last_partial_validation_sequence   False: the last, short sample of valid is kept, padded
    add_extra_token_to_sequence             x = 1: labels are the next tokens, to the last one
    inter_document_masking   instead of a mask: cu_seqlens, max_seqlen, positions by document

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
    inter_document_masking: bool = False

    def __post_init__(self):
        super().__post_init__()
        _require(self.tokenizer is not None, "a GPTDatasetConfig needs a tokenizer, for its eod")
        dense = self.create_attention_mask and not self.inter_document_masking
        _require(dense or not self.reset_attention_mask, "reset_attention_mask has no effect "
                 "without a dense mask: set create_attention_mask, or inter_document_masking alone")


# ==============================================================================
# 4. Kernels
# ==============================================================================
# Question answered here: in which order do documents and samples come, and where does each start?
#
#   position  0 1 2 3 4 5 6 7 8 9 ...      sample 0 = a a a a b    inputs a a a a   labels a a a b
#   stream    a a a a b b b c c c c c c    sample 1 = b b b c c    row 1 -> (document 1, offset 0)
#
# Nothing is tokenised or copied here; four loops fill arrays of integers.  Each _py_ function is
# the definition of its kernel; the C function of the same name is equal and faster, and is swapped
# in below them.  The public functions check, allocate and call one or the other.


def _py_build_sample_idx(sample_index, sizes, document_index, sequence_length, extra, last_token):
    """sample_index (N+1, 2) is filled; extra is x; row N stops at last_token, which is before the
    end of sample N-1 where that one is partial.
    """
    wrong = np.flatnonzero((document_index < 0) | (document_index >= len(sizes)))
    for at in wrong[:1]:
        raise IndexError(f"document_index[{at}] is {document_index[at]}, but there are "
                         f"{len(sizes)} sequences")
    lengths = sizes[document_index]
    _require((lengths >= 0).all(), "a size is negative: no sequence has less than 0 tokens")
    ends = np.cumsum(lengths, dtype=np.int64)
    sample_index[0] = 0
    if len(sample_index) > 1:
        found = int(ends[-1]) if len(ends) else 0
        _require(found >= last_token,
                 f"the documents hold {found} tokens, the samples need {last_token}")
        targets = np.arange(1, len(sample_index), dtype=np.int64) * sequence_length + extra
        targets[-1] = last_token
        rows = np.searchsorted(ends, targets)  # the first document whose end reaches the target
        sample_index[1:, 0] = rows
        sample_index[1:, 1] = targets - extra - (ends[rows] - lengths[rows])


def _py_shuffle(items, key, position):
    """items are shuffled; key, uint32 (624,), and the result are the generator's new state."""
    random_state = np.random.RandomState()
    random_state.set_state(("MT19937", key, position))
    random_state.shuffle(items)
    _, key[:], position, *_ = random_state.get_state()
    return position


def _py_build_blending_indices(dataset_index, dataset_sample_index, weights, num_datasets, size):
    """int16 and int64 (size,) are filled; weights float64 (num_datasets,)."""
    taken = np.zeros(num_datasets)
    for i in range(size):
        d = np.argmax(weights * max(i, 1) - taken)  # the lowest of equals
        dataset_index[i], dataset_sample_index[i] = d, taken[d]
        taken[d] += 1


def _py_build_exhaustive_blending_indices(dataset_index, dataset_sample_index, sizes, num_datasets):
    """The same, of sum(sizes); sizes int64 (num_datasets,)."""
    taken, total = np.zeros(num_datasets), int(sizes.sum())
    weights = sizes / np.float64(max(total, 1))
    for i in range(total):
        d = np.argmax(np.where(taken < sizes, weights * max(i, 1) - taken, -np.inf))
        dataset_index[i], dataset_sample_index[i] = d, taken[d]
        taken[d] += 1


IMPLEMENTATION = "python"  # or "c": which kernels are in use
_build_sample_idx, _shuffle = _py_build_sample_idx, _py_shuffle
_build_blending_indices = _py_build_blending_indices
_build_exhaustive_blending_indices = _py_build_exhaustive_blending_indices
if os.environ.get("MEGATRON_MIN_C") != "0":
    try:
        import _megatron_min

        _build_sample_idx, _shuffle = _megatron_min.build_sample_idx, _megatron_min.shuffle
        _build_blending_indices = _megatron_min.build_blending_indices
        _build_exhaustive_blending_indices = _megatron_min.build_exhaustive_blending_indices
        IMPLEMENTATION = "c"
    except ImportError:
        if os.environ.get("MEGATRON_MIN_C") == "1":
            raise  # asked for C: never fall back silently


def count_samples(tokens, sequence_length, drop_last_partial_sequence=True,
                  add_extra_token_to_sequence=True):
    """Samples in a stream of so many tokens, in exact integers.

    >>> count_samples(13, 4), count_samples(14, 4, drop_last_partial_sequence=False)
    (3, 4)
    """
    whole, rest = divmod(max(0, tokens - bool(add_extra_token_to_sequence)), sequence_length)
    return whole + (rest > 0 and not drop_last_partial_sequence)


def build_sample_idx(sizes, document_indices, sequence_length, num_epochs, tokens_per_epoch,
                     drop_last_partial_sequence=True, add_extra_token_to_sequence=True):
    """Find where every training sample starts in the stream of shuffled documents.

    The stream is the documents named by document_indices, laid end to end.  Sample k is its tokens
    [k*S, k*S + S + x); with x = 1 its last token is its last label, and sample k+1 reads it again.

    sizes             int32 (sequences of the file,)  tokens in each
    document_indices  int32 (E*D,)                    which sequence comes d-th in the stream
    sequence_length   int >= 1                        S, without the extra token
    tokens_per_epoch  int                             the stream holds num_epochs times as many
    Returns           int32 (N+1, 2)                  row k = (d, offset into document_indices[d])
                                                      of sample k's first token; row N is where
                                                      sample N-1 stops.  int64 from E*D = 2**31 on
    Raises            ValueError                      S < 1, or a stream too short for its samples
                      IndexError                      an entry of document_indices is no sequence
    Cost              O(N + E*D) time, 8 bytes a row; no .bin file is opened.
    Upstream          helpers.build_sample_idx.  With x = 0 a row may point one past the end of a
                      document instead of at the next one's start: kept.  The number of samples with
                      a partial last one is exact here, rounded to float32 there.

    >>> sizes = np.array([4, 3, 6], np.int32)               # aaaa bbb cccccc
    >>> build_sample_idx(sizes, np.arange(3, dtype=np.int32), 4, 1, 13).tolist()
    [[0, 0], [1, 0], [2, 1], [2, 5]]
    """
    sizes = _checked(sizes, "sizes", np.int32)
    documents = _checked(document_indices, "document_indices", np.int32)
    extra, tokens = int(bool(add_extra_token_to_sequence)), int(num_epochs) * int(tokens_per_epoch)
    _require(sequence_length >= 1, f"sequence_length must be >= 1, got {sequence_length}")
    _require(0 <= tokens <= len(documents) * 2**31 and num_epochs >= 0,
             f"{len(documents)} documents cannot hold {tokens} tokens")
    num_samples = count_samples(tokens, sequence_length, drop_last_partial_sequence, extra)
    # upstream asks for int64 where a size needs it too; sizes are int32, so none can
    dtype = np.int32 if len(documents) < 2**31 else np.int64
    sample_index = np.empty((num_samples + 1, 2), dtype)
    last_token = min(tokens, num_samples * sequence_length + extra)
    _build_sample_idx(sample_index, sizes, documents, sequence_length, extra, last_token)
    if last_token < num_samples * sequence_length and not extra:  # UPSTREAM: a last, partial sample
        sample_index[-1] = len(documents) - 1, sizes[documents[-1]]  # takes the empty documents
    return sample_index


def _checked(values, name, *dtypes, out=False):
    """A 1-D array of one of dtypes, contiguous; TypeError or ValueError for what is none, and for
    what is to be filled (out) and cannot be."""
    kind = getattr(values, "dtype", type(values).__name__)
    _require(kind in dtypes, f"{name} must be {np.dtype(dtypes[0])}, got {kind}", TypeError)
    fit = values.ndim == 1 and (not out or values.flags.carray)
    _require(fit, f"{name} must be 1-D{', contiguous, writable' * out}, got shape {values.shape}, "
             f"strides {values.strides}")
    return np.ascontiguousarray(values)


def shuffle(items, random_state):
    """Shuffle a 1-D array in place, exactly as random_state.shuffle(items), several times faster.

    items         int32, uint32 or int64, contiguous
    random_state  numpy.random.RandomState; left in the same state as by its own shuffle
    The rule is Fisher-Yates from the top: for i = n-1 .. 1, swap items[i] with items[j], j uniform
    in [0, i] by masked rejection of 32-bit draws.  Cost: O(n), as fast as memory is read at random.

    >>> items = np.arange(3, dtype=np.int32)
    >>> shuffle(items, np.random.RandomState(1234)); items.tolist()
    [0, 1, 2]
    """
    _checked(items, "items", np.int32, np.uint32, np.int64, out=True)
    state = random_state.get_state(legacy=False)
    key = np.array(state["state"]["key"], np.uint32)
    state["state"] = {"key": key, "pos": _shuffle(items, key, state["state"]["pos"])}
    random_state.set_state(state)


def build_blending_indices(dataset_index, dataset_sample_index, weights, num_datasets, size,
                           verbose=False):
    """Fill in, for each sample of a blend, its dataset and its place in that dataset.

    Sample i comes from the dataset that is furthest behind: the largest weights[d] * max(i, 1) -
    taken[d] in IEEE doubles, the lowest d among equals.  With weights 0.25 and 0.75:

        i   0.25 * max(i, 1) - taken   0.75 * max(i, 1) - taken     taken from
        0   0.25                       0.75                         1
        1   0.25                       0.75 - 1 = -0.25             0
        2   0.5 - 1 = -0.5             1.5 - 1 = 0.5                1
        3   0.75 - 1 = -0.25           2.25 - 2 = 0.25              1

    dataset_index         int16 (size,)          out
    dataset_sample_index  int64 (size,)          out
    weights               float64 (num_datasets,) normalized
    Upstream              helpers.build_blending_indices (verbose is taken for its sake)

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_blending_indices(which, sample, np.array([0.25, 0.75]), 2, 4)
    >>> which.tolist(), sample.tolist()
    ([1, 0, 1, 1], [0, 0, 1, 2])
    """
    weights = np.ascontiguousarray(weights, np.float64)[:num_datasets]
    _check_blending(dataset_index, dataset_sample_index, weights, num_datasets, size)
    _build_blending_indices(dataset_index, dataset_sample_index, weights, num_datasets, size)


def build_exhaustive_blending_indices(dataset_index, dataset_sample_index, sizes, num_datasets):
    """The same rule with weights sizes[d] / sum(sizes), until dataset d has given sizes[d] samples.

    Fills int16 and int64 arrays of sum(sizes).  Upstream: the function of the same name in helpers.

    >>> which, sample = np.zeros(4, np.int16), np.zeros(4, np.int64)
    >>> build_exhaustive_blending_indices(which, sample, np.array([1, 3]), 2)
    >>> which.tolist(), sample.tolist()
    ([1, 0, 1, 1], [0, 0, 1, 2])
    """
    counts = np.ascontiguousarray(sizes, np.int64)[:num_datasets]
    _require(np.array_equal(counts, sizes[:num_datasets]),
             f"sizes must be whole numbers, got {sizes}")
    _check_blending(dataset_index, dataset_sample_index, counts, num_datasets,
                    sum(counts.tolist()))
    _build_exhaustive_blending_indices(dataset_index, dataset_sample_index, counts, num_datasets)


def _check_blending(dataset_index, dataset_sample_index, weights, num_datasets, size):
    """What the Python and the C of both blending kernels must be able to trust."""
    for out, name, dtype in ((dataset_index, "dataset_index", np.int16),
                             (dataset_sample_index, "dataset_sample_index", np.int64)):
        _checked(out, name, dtype, out=True)
        _require(0 <= size <= len(out), f"{name} has {len(out)} places for {size} samples")
    _require(not np.may_share_memory(dataset_index, dataset_sample_index), "the outputs overlap")
    _require(0 < num_datasets < 32767 and len(weights) == num_datasets,
             f"num_datasets must be 1 to 32766, each with a weight, got {num_datasets}")
    for d, weight in enumerate(weights.tolist()):
        _require(0 <= weight < math.inf, f"weight of dataset {d}: wanted >= 0, got {weight}")


# ==============================================================================
# 5. GPTDataset and its cache
# ==============================================================================
# Question answered here: what are the tokens of sample k?
#
#   k --shuffle_index--> j --sample_index[j], [j + 1]--> (d, offset) .. (d', offset')
#     --document_index[d .. d']--> sequences of the file pair --> S + x tokens
#
#   positions              0 1 2 3 4 5 6 7 8 9 . . .       S = 4, x = 1: 13 tokens hold 3 samples
#   stream                 a a a a b b b c c c c c c
#   sample 0               a a a a b                      inputs are all but the last token, labels
#   sample 1                       b b b c c              all but the first; so neighbours share one
#   sample 2                               c c c c c      token, and no label is lost between them
#
# The three arrays depend on the lengths, the split, the number of samples, S and the seed alone, so
# they are built once and cached: every rank, and the next job, maps the same files.  Beside
# upstream's files lies a manifest, written last, which says what they were made from:
#
#   <hash>-GPTDataset-train-description.txt      what was asked for; hash is its md5
#                          -document_index.npy   and -sample_index.npy, -shuffle_index.npy
#                          -manifest.json        the .idx, the settings, size and CRC-32 of arrays
#
#   found                                          then
#   nothing                                        built
#   all, manifest matches                          used (the CRCs are read by rank 0)
#   all, no manifest (upstream's), or a .idx       every array is compared with one made anew; used,
#     of another time (a copied corpus)              and given a manifest
#   anything else: torn, altered, other data       built anew, with a warning that says why

Geometry = collections.namedtuple(
    "Geometry", "num_epochs num_samples separate_final_epoch num_samples_sans_final_epoch")


def epoch_geometry(tokens_per_epoch, num_samples, sequence_length, drop_last_partial_sequence=True,
                   add_extra_token_to_sequence=True):
    """How many epochs give num_samples samples (None: one epoch), and is the last shuffled apart?

    E is the least with E*T >= num_samples*S + x.  The last epoch is shuffled apart when fewer than
    80 % of its samples are asked for: shuffled with the others, it would displace some of theirs.
    ValueError if samples are asked of no tokens (upstream never returns).

    >>> epoch_geometry(13, 4, 4)                  # 13 tokens hold 3 samples of 4 + 1
    Geometry(num_epochs=2, num_samples=6, separate_final_epoch=True, num_samples_sans_final_epoch=3)
    """
    tokens, length, extra = tokens_per_epoch, sequence_length, int(add_extra_token_to_sequence)
    _require((num_samples or 0) >= 0, f"wanted num_samples >= 0, got {num_samples}")
    _require(tokens or not num_samples, f"{num_samples} samples of a split that holds no tokens")
    epochs = max(1, -(-(num_samples * length + extra) // tokens)) if num_samples else 1
    total = count_samples(epochs * tokens, length, drop_last_partial_sequence, extra)
    if epochs == 1:
        return Geometry(1, total, False, 0)
    sans_final = ((epochs - 1) * tokens - extra) // length
    from_final, per_epoch = num_samples - sans_final, (tokens - extra) // length
    assert 0 <= from_final <= per_epoch + 1  # follows from the choice of epochs
    return Geometry(epochs, total, from_final < int(0.80 * per_epoch), sans_final)


def build_document_index(documents, num_epochs, random_state, separate_final_epoch):
    """documents repeated num_epochs times and shuffled, the last epoch apart if so asked.

    int32 (D,) -> int32 (E*D,).  Cost: one shuffle, and no more memory than the result.
    Upstream: _build_document_index.  All epochs but the last are one pile: a document may come
    twice before another comes once.

    >>> build_document_index([0, 1, 2], 2, np.random.RandomState(1234), False).tolist()
    [2, 1, 2, 0, 1, 0]
    """
    document_index = np.tile(np.asarray(documents, np.int32), num_epochs)
    edge = len(document_index) - (len(documents) if separate_final_epoch else 0)
    return _shuffle_parts(document_index, edge, random_state)


def build_shuffle_index(num_samples, total_size, random_state):
    """arange(total_size), the first num_samples shuffled, then the rest.

    uint32 (total_size,), int64 from 2**32 - 2 up.  Upstream: _build_shuffle_index.

    >>> build_shuffle_index(3, 6, np.random.RandomState(3)).tolist()     # 0 1 2 stay before 3 4 5
    [1, 0, 2, 3, 5, 4]
    """
    dtype = np.uint32 if total_size < 2**32 - 2 else np.int64
    return _shuffle_parts(np.arange(total_size, dtype=dtype), num_samples, random_state)


def _shuffle_parts(items, edge, random_state):
    """Shuffle items[:edge], then items[edge:], in place."""
    shuffle(items[:edge], random_state)
    shuffle(items[edge:], random_state)  # draws nothing if there is no rest
    return items


class _IndexCache:
    """The arrays of one dataset as .npy files in a folder, and the manifest that vouches for them.

    names    of the arrays
    source   what the manifest must say, and a time; another time alone asks for a closer look
    """

    def __init__(self, dataset, folder, split, names):
        self.folder, self.description = folder, dataset.unique_description
        stem = f"{dataset.unique_description_hash}-{type(dataset).__name__}-{split.name}"
        self.base, self.files = os.path.join(folder, stem), [f"{name}.npy" for name in names]

    def path(self, suffix):
        """The file of an array, of the description or of the manifest."""
        return pathlib.Path(f"{self.base}-{suffix}")

    def missing(self):
        """The files without which upstream sees no cache."""
        return [name for name in (*self.files, "description.txt") if not self.path(name).is_file()]

    def open(self):
        """Map the arrays, read-only; nothing is ever unpickled."""
        return [np.load(self.path(file), mmap_mode="r", allow_pickle=False).view(np.ndarray)
                for file in self.files]

    def load(self, source, build, read_all):
        """-> the arrays, or None where there are none; any exception means: build them anew.

        The manifest must match, CRCs too if read_all.  Where there is none (upstream's cache), or
        only the time of the .idx differs (a copy), they must equal what build() makes.
        """
        vouched, described = (self.path(f).exists() for f in ("manifest.json", "description.txt"))
        if not vouched and not described:
            return None  # nothing, or another process is at it: it writes these two last
        manifest, (made_of, mtime_ns) = {"source": source[0]}, source
        found = self.path("description.txt").read_text("utf-8")
        _require(found == self.description, "its description is another dataset's")
        if vouched:
            manifest = json.loads(self.path("manifest.json").read_text("utf-8"))
        made_from, arrays = manifest["source"], self.open()
        _require(made_from == made_of, f"it was made from {made_from}, not {made_of}")
        if "files" not in manifest or manifest["mtime_ns"] != mtime_ns:
            for file, found, wanted in zip(self.files, arrays, build()):
                _require(found.dtype == wanted.dtype and np.array_equal(found, wanted),
                         f"{file} is not what the data and the settings make")
            self._write_manifest(*source)
        elif manifest["files"] != self._entries(read_all, manifest["files"]):
            raise ValueError("a file has another size or checksum than when it was written")
        return arrays

    def _entries(self, read_all=True, known=None):
        """{file: {size, crc32}} of the files as they are; without read_all, which reads about a
        GiB a second, with the known CRCs."""
        files = {file: _map_file(self.path(file)) for file in self.files}
        return {file: {"size": len(data), "crc32": zlib.crc32(data) if read_all else
                       known[file]["crc32"]} for file, data in files.items()}

    def save(self, source, arrays):
        """Write all, the manifest last -> the arrays, mapped; as they are if the folder refuses."""
        try:
            os.makedirs(self.folder, exist_ok=True)
            self.path("manifest.json").unlink(missing_ok=True)
            for name, values in zip(self.files, arrays):
                with _NewFile(self.path(name)) as file:
                    np.save(file, values, allow_pickle=False)
            with _NewFile(self.path("description.txt")) as file:
                file.write(self.description.encode())
            self._write_manifest(*source)
            return self.open()
        except OSError as error:
            warnings.warn(f"the index cache {self.folder} cannot be written ({error}): the indices "
                          "stay in memory; set path_to_cache to a folder that can")
            return arrays

    def _write_manifest(self, made_of, mtime_ns):
        """Vouch for the files as they are; a folder that is read-only stays without."""
        manifest = {"source": made_of, "mtime_ns": mtime_ns, "files": self._entries()}
        with contextlib.suppress(OSError), _NewFile(self.path("manifest.json")) as file:
            file.write(json.dumps(manifest, indent=4).encode())


class _CachedIndices:
    """Mixin: index arrays that are built or loaded, opened late if so asked, and pickled as paths.

    A class that has it defines source() -> what the arrays are made of, and a time or None;
    _build_arrays() -> arrays; and _batch(indices) -> samples.
    """

    def _prepare_indices(self, folder, split, names):
        """Load or build; without a folder to keep the arrays in they stay in memory."""
        self._cache = _IndexCache(self, folder, split, names) if folder else None
        self._arrays = None
        if not folder:
            self._arrays = self._build_arrays()
        elif not self.config.fast_cache_load or self._cache.missing():
            self._arrays = self._load_or_build(self._cache)
            if self.config.defer_npy_index_mmap and not self._cache.missing():
                self._arrays = None

    def _load_or_build(self, cache):
        """The cached arrays if they are whole and right, else new ones, and a warning why."""
        arrays, source = None, self.source()
        try:
            arrays = cache.load(source, self._build_arrays, read_all=_rank() == 0)
        except Exception as error:  # a cache is never needed: whatever is wrong, build it anew
            warnings.warn(f"the cache {cache.base} is rebuilt: {type(error).__name__}: {error}")
        return arrays or cache.save(source, self._build_arrays())

    def _index(self, at):
        """Array number at, from the cache if it was not needed before."""
        if self._arrays is None:
            self._arrays = self._cache.open()
        return self._arrays[at]

    def __getitem__(self, idx):
        return self._batch([idx])[0]

    def __getitems__(self, indices):
        """The samples of a list of indices (None: padding), made as one batch -> list of dicts.

        Samples of a batch are rows of one tensor for each key: no element is in two of them.
        """
        if type(self).__getitem__ is not _CachedIndices.__getitem__:  # a subclass has its own
            return [self[i] for i in indices]
        return self._batch(indices)

    def __getstate__(self):
        state = dict(self.__dict__)
        if self._cache is not None and not self._cache.missing():
            state["_arrays"] = None  # the other process maps the files
        return state


def _is_distributed():
    """Is this one of several processes of a job?"""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank():
    """This process's global rank; 0 without torch.distributed."""
    return torch.distributed.get_rank() if _is_distributed() else 0


def _describe(dataset, identifiers):
    """Set unique_identifiers, the text of them that upstream writes, and the md5 of the text."""
    dataset.unique_identifiers = collections.OrderedDict(identifiers)
    dataset.unique_description = json.dumps(
        dataset.unique_identifiers, indent=4, default=lambda obj: obj.unique_identifiers)
    dataset.unique_description_hash = _md5(dataset.unique_description)


class MegatronDataset(abc.ABC, torch.utils.data.Dataset):
    """The base of datasets that the builder can build.  Upstream: MegatronDataset.

    dataset        what build_low_level_dataset made
    dataset_path   its path prefix, or None
    indices        int32: the elements of dataset that belong to this split
    num_samples    how many are wanted; None: one epoch
    """

    def __init__(self, dataset, dataset_path, indices, num_samples, index_split, config):
        dataset_path = None if dataset_path is None else os.fspath(dataset_path)
        num_samples = None if num_samples is None else int(num_samples)
        self.dataset, self.dataset_path, self.indices = dataset, dataset_path, np.asarray(indices)
        self.num_samples, self.index_split, self.config = num_samples, index_split, config
        key = {"class": type(self).__name__, "dataset_path": dataset_path,
               "num_samples": num_samples, "index_split": index_split.name}
        key |= {name: getattr(config, name) for name in self._key_config_attributes()}
        _describe(self, key | self._further_identifiers())

    @staticmethod
    @abc.abstractmethod
    def numel_low_level_dataset(low_level_dataset):
        """How many elements the split matrix cuts."""

    @staticmethod
    @abc.abstractmethod
    def build_low_level_dataset(dataset_path, config):
        """Open what lies at dataset_path."""

    @staticmethod
    def _key_config_attributes():
        """The fields of the config that change the arrays; a subclass may add to them."""
        return ["random_seed", "sequence_length", "split", "split_matrix", "tokenizer"]

    def _further_identifiers(self):
        """What else the cache depends on, where upstream's key is wrong; {} where it is right."""
        return {}

    @abc.abstractmethod
    def __len__(self):
        """Number of samples."""

    @abc.abstractmethod
    def __getitem__(self, idx):
        """Sample idx: a dict of tensors."""


class GPTDataset(_CachedIndices, MegatronDataset):
    """Samples of S tokens, cut from the shuffled documents laid end to end.  Upstream: GPTDataset.

    indexed_dataset   IndexedDataset
    dataset_path      its path prefix, which enters the cache's key
    indexed_indices   int32 (D,)  the sequences of this split
    num_samples       at least so many; None: those of one epoch
    ds[k] is a dict   tokens, labels, position_ids int64 (S,), loss_mask float32 (S,);
                      attention_mask bool (1, S, S), True = may not attend, if the config wants it;
                      cu_seqlens int32 (S+1,), max_seqlen int32 () with inter_document_masking
    ds[None]          sample 0 with no loss: the padding of a batch
    Cost              to build: O(E*D + N); a sample: one read for each document it touches

    >>> prefix, config = toy_corpus(), GPTDatasetConfig(1234, 4, blend=(["toy"], None), split="1",
    ...     tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> all_documents = np.arange(3, dtype=np.int32)
    >>> ds = GPTDataset(IndexedDataset(prefix), prefix, all_documents, 3, Split.train, config)
    >>> ds.document_index.tolist(), ds.sample_index.tolist(), ds.shuffle_index.tolist()
    ([0, 1, 2], [[0, 0], [1, 0], [2, 1], [2, 5]], [1, 2, 0])
    >>> ByteTokenizer().detokenize(ds[0]["tokens"]), ByteTokenizer().detokenize(ds[0]["labels"])
    ('bbbc', 'bbcc')
    """

    def __init__(self, indexed_dataset, dataset_path, indexed_indices, num_samples, index_split,
                 config):
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split,
                         config)
        self._check_range()
        dtype = np.dtype(getattr(indexed_dataset, "dtype", np.int64))
        _require(dtype.kind in "iu", f"{_name(self)} holds {dtype}: token ids must be integers")
        self._pad_token_id, self._warned_of_pad = _pad_token_id(config), False
        folder, names = config.path_to_cache, ("document_index", "sample_index", "shuffle_index")
        if not folder and dataset_path is not None:
            folder = f"{self.dataset.path_prefix}/cache/{type(self).__name__}_indices"
        self._prepare_indices(folder, index_split, names)
        if config.reset_position_ids or config.reset_attention_mask or config.eod_mask_loss:
            self._warn_without_eod()

    def __getstate__(self):
        """Without the arrays that the other process can map, or make from a first and a last."""
        low, high, scattered = self._documents
        return super().__getstate__() | ({} if scattered else {"indices": range(low, high)})

    def __setstate__(self, state):
        self.__dict__ = state | {"indices": np.asarray(state["indices"], np.int32)}

    @staticmethod
    def numel_low_level_dataset(low_level_dataset):
        """Sequences in the file."""
        return len(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        """Open the pair at dataset_path."""
        _require(dataset_path is not None, "no blend is given: give one, or build MockGPTDataset")
        check = False if config.fast_cache_load else None
        return IndexedDataset(dataset_path, mmap=config.mmap_bin_files, check=check)

    def _check_range(self):
        """IndexError for documents that the corpus does not have."""
        n, some = len(self.dataset), len(self.indices)
        low, high = (int(self.indices.min()), int(self.indices.max())) if some else (0, -1)
        _require(0 <= low and high < n < 2**31, f"{_name(self)}: documents {low} .. {high} of {n}, "
                 f"and document_index, int32, can name {2**31 - 1}", IndexError)

    @property
    def _keep_partial(self):
        """Is the last sample kept although it is short?  Only ever of valid."""
        drop = self.config.drop_last_partial_validation_sequence
        return self.index_split is Split.valid and not drop

    def _further_identifiers(self):
        entries, matrix = {}, self.config.split_matrix
        if not self.config.add_extra_token_to_sequence:
            entries["add_extra_token_to_sequence"] = False
        if self._keep_partial:
            entries["drop_last_partial_validation_sequence"] = False
        bounds = (matrix and matrix[self.index_split.value]) or (0, 1)
        usual = [*split_range(bounds, len(self.dataset)), None]
        if self._documents != usual and (len(self.indices) or usual[0] < usual[1]):
            entries["documents"] = self._documents
        return entries

    @functools.cached_property
    def _documents(self):
        """[first, end, None] if the split is one run of documents, else with a digest of them."""
        indices, size = self.indices, len(self.indices)
        low, high = (int(indices[0]), int(indices[-1]) + 1) if size else (0, 0)
        is_run = high - low == size and all(
            (np.diff(indices[at:at + _CHUNK + 1]) == 1).all() for at in range(0, size, _CHUNK))
        return [low, high, None if is_run else _md5(str(indices.tolist()))]

    def source(self):
        """What the arrays are made of: {documents, settings, identity of the .idx}, its time."""
        source = {"format": 1, "documents": self._documents, "keep_partial": self._keep_partial,
                  "extra_token": bool(self.config.add_extra_token_to_sequence)}
        if not isinstance(self.dataset, IndexedDataset):
            return source, None
        path, edge = get_idx_path(self.dataset.path_prefix), 1 << 16
        stat, index = os.stat(path), _map_file(path)
        # head and tail are enough to tell a regenerated file, for free
        ends = _md5(index[:edge].tobytes() + index[-edge:].tobytes())
        return source | {"idx_size": stat.st_size, "idx_ends": ends}, stat.st_mtime_ns

    def tokens_per_epoch(self):
        """T: the tokens of the split's documents."""
        low, high, scattered = self._documents
        lengths = self.dataset.sequence_lengths
        return int((lengths[self.indices] if scattered else lengths[low:high]).sum(dtype=np.int64))

    def geometry(self):
        """The Geometry of this split."""
        tokens, config = self.tokens_per_epoch(), self.config
        _require(tokens or not self.num_samples, f"{_name(self)}: {self.num_samples} samples of "
                 f"{self.index_split.name} were asked for, but documents {self._documents[:2]} of "
                 f"split {config.split!r} hold no tokens: give it a larger share, or ask for none")
        return epoch_geometry(tokens, self.num_samples, config.sequence_length,
                              not self._keep_partial, config.add_extra_token_to_sequence)

    def _build_arrays(self):
        """One generator draws everything: documents first, then samples, as upstream."""
        if isinstance(self.dataset, IndexedDataset):
            self.dataset.verify()
        config, (epochs, total, apart, sans_final) = self.config, self.geometry()
        random_state = np.random.RandomState(config.random_seed)
        document_index = build_document_index(self.indices, epochs, random_state, apart)
        sample_index = build_sample_idx(
            self.dataset.sequence_lengths, document_index, config.sequence_length, epochs,
            self.tokens_per_epoch(), not self._keep_partial, config.add_extra_token_to_sequence)
        shuffle_index = build_shuffle_index(sans_final if apart else total, total, random_state)
        return [document_index, sample_index, shuffle_index]

    document_index = property(lambda self: self._index(0), doc="int32 (E*D,): order of documents")
    sample_index = property(lambda self: self._index(1), doc="(N+1, 2): where each sample starts")
    shuffle_index = property(lambda self: self._index(2), doc="uint32 (N,): order of samples")

    def __len__(self):
        return len(self.sample_index) - 1

    def _batch(self, indices):
        """__getitems__ of this class."""
        batch = self._arrays_of([self._pieces(0 if k is None else k) for k in indices])
        for row in (row for row, k in enumerate(indices) if k is None):
            batch["loss_mask"][row] = 0
        return [{key: torch.from_numpy(values[row, ...]) for key, values in batch.items()}
                for row in range(len(indices))]

    def _pieces(self, k):
        """Sample k -> [(sequence, offset, length), ...], as they follow each other."""
        j = int(self.shuffle_index[_position(k, len(self), f"the samples of {_name(self)}")])
        (first, begin), (last, end) = self.sample_index[j:j + 2].tolist()
        sequences = self.document_index[first:last + 1].tolist()
        ends = [int(self.dataset.sequence_lengths[i]) for i in sequences]
        ends[-1] = end + bool(self.config.add_extra_token_to_sequence)
        begins = [begin] + [0] * (last - first)
        return [(i, low, high - low) for i, low, high in zip(sequences, begins, ends)]

    def _arrays_of(self, pieces):
        """Pieces of B samples -> their dict, (B, ...) each.  Upstream: GPTDataset.__getitem__."""
        config, pad, length = self.config, self._pad_token_id, self.config.sequence_length
        texts, padding = self._texts(pieces)
        tokens, labels = texts[:, :length].copy(), np.full((len(pieces), length), pad)
        labels[:, :texts.shape[1] - 1] = texts[:, 1:]  # without an extra token, pad comes last
        eod, is_pad = tokens == config.tokenizer.eod, labels == pad
        batch = {"tokens": tokens, "labels": labels, "loss_mask": (~is_pad).astype(np.float32)}
        batch["position_ids"] = np.arange(length)[None].repeat(len(pieces), 0)
        if config.inter_document_masking:
            self._mask_by_documents(batch, pieces, padding)
        elif config.create_attention_mask:
            batch["attention_mask"] = _attention_mask(eod, config.reset_attention_mask)
        if config.reset_position_ids and not config.inter_document_masking:
            starts = np.maximum.accumulate(np.where(eod, batch["position_ids"] + 1, 0), axis=1)
            batch["position_ids"][:, 1:] -= starts[:, :-1]
        if config.eod_mask_loss:
            batch["loss_mask"][eod] = 0
        if is_pad.any() or (tokens == pad).any():
            self._warn_of_pad(int((texts == pad).sum()) - sum(padding))
            tokens[tokens == pad] = labels[is_pad] = 0  # the embedding must be able to look it up
        return batch

    def _texts(self, pieces):
        """Pieces of B samples -> their tokens int64 (B, S + x), and how much of each is padding."""
        width = self.config.sequence_length + bool(self.config.add_extra_token_to_sequence)
        texts, padding = np.full((len(pieces), width), self._pad_token_id, np.int64), []
        for row, sample in zip(texts, pieces):
            at = 0
            for sequence, offset, length in sample:
                row[at:at + length] = self.dataset.get(sequence, offset, length)
                at += length
            padding.append(width - at)
        return texts, padding

    def _mask_by_documents(self, batch, pieces, padding):
        """cu_seqlens: the ends of each sample's documents; positions restart at each of them.

        The extra token is taken off the last piece, padding is added to it, empty pieces are left
        out: so cu_seqlens rises from 0 to S without a pause, and then repeats S.
        """
        rows, length = batch["tokens"].shape
        batch["cu_seqlens"] = np.full((rows, length + 1), length, np.int32)
        batch["max_seqlen"] = np.zeros(rows, np.int32)
        for row, sample in enumerate(pieces):
            sizes = [size for _, _, size in sample if size]
            sizes[-1] += padding[row] - bool(self.config.add_extra_token_to_sequence)
            sizes = sizes if sizes[-1] else sizes[:-1]
            ends = np.array([0, *itertools.accumulate(sizes)])
            batch["cu_seqlens"][row, :len(ends)] = ends
            batch["max_seqlen"][row] = max(sizes)
            batch["position_ids"][row] -= np.repeat(ends[:-1], sizes)

    def _warn_of_pad(self, count):
        """Warn once of real tokens that will be taken for padding (upstream is silent)."""
        if count > 0 and not self._warned_of_pad:
            self._warned_of_pad = True
            warnings.warn(f"{_name(self)}: {count} real tokens equal the pad id "
                          f"{self._pad_token_id}: as in Megatron-LM, they become 0 without loss")

    def _warn_without_eod(self, looked_at=16):
        """Warn if the first documents lack the eod that three of the flags go by."""
        eod = self.config.tokenizer.eod
        last = [self.dataset.get(i)[-1:] for i in self.indices[:looked_at].tolist()]
        if any(map(len, last)) and not any(eod in token for token in last):
            warnings.warn(f"{_name(self)}: none of the first {len(last)} documents ends in eod "
                          f"({eod}), so reset_position_ids, reset_attention_mask and eod_mask_loss "
                          "find nothing: was it tokenized with --append-eod?")


def _name(dataset):
    """What to call a dataset in a message: its path, or its class."""
    return str(getattr(dataset, "dataset_path", None) or type(dataset).__name__)


def _attention_mask(eod, reset):
    """bool (B, 1, S, S), True = may not attend: the future; with reset, across eod (B, S) too.

    >>> _attention_mask(np.array([[False, True, False, False]]), True).astype(int)[0, 0]  # a $ b b
    array([[0, 1, 1, 1],
           [0, 0, 1, 1],
           [1, 1, 0, 1],
           [1, 1, 0, 0]])
    """
    rows, length = eod.shape
    mask = np.empty((rows, 1, length, length), bool)
    mask[:] = np.triu(np.ones((length, length), bool), 1)
    for row, position in np.argwhere(eod).tolist() if reset else ():
        mask[row, 0, position + 1:, :position + 1] = True
    return mask


def _pad_token_id(config):
    """The id that fills short samples: the tokenizer's pad; -1 if none, or if it is ambiguous."""
    tokenizer = config.tokenizer
    pad, special = getattr(tokenizer, "pad", None), getattr(tokenizer, "special_tokens_dict", None)
    special = {name: token for name, token in (special or {}).items() if name != "pad_token"}
    special = special or {name: getattr(tokenizer, name, None) for name in ("eos", "eod")}
    same = [name for name, token in special.items() if token == pad]
    if pad is not None and same and not config.allow_ambiguous_pad_tokens:
        warnings.warn(f"the pad id {pad} is also the tokenizer's {' and '.join(same)}: padding is "
                      "-1, so that real tokens keep their loss (see allow_ambiguous_pad_tokens)")
        pad = None
    return -1 if pad is None else pad


class MockGPTLowLevelDataset:
    """Sequence i is 1, 2, ..., length - 1 (mod vocabulary), then eod.  Upstream: the same name."""

    def __init__(self, tokenizer):
        self.tokenizer, generator = tokenizer, np.random.default_rng(0)
        self.sequence_lengths = generator.integers(1, 4096, size=100_000, dtype=np.int32)

    def __len__(self):
        return len(self.sequence_lengths)

    def __getitem__(self, idx):
        length, vocab_size = self.sequence_lengths[idx], self.tokenizer.vocab_size
        return np.append(np.arange(1, length, dtype=np.int64) % vocab_size, self.tokenizer.eod)

    def get(self, idx, offset=0, length=None):
        """As IndexedDataset.get."""
        return self[idx][offset:None if length is None else offset + length]


class MockGPTDataset(GPTDataset):
    """Samples of numbers counted up, for speed runs without data.  Upstream: MockGPTDataset."""

    @staticmethod
    def build_low_level_dataset(dataset_path, config):
        """100,000 sequences of 1 to 4,095 tokens; dataset_path is not used."""
        return MockGPTLowLevelDataset(config.tokenizer)


# ==============================================================================
# 6. BlendedDataset
# ==============================================================================
# Question answered here: which dataset, and which of its samples, is sample i of the blend?
#
#   weights 0.25, 0.75     i                      0  1  2  3    the dataset that is furthest behind
#                          dataset_index          1  0  1  1    its weight comes next, so after any
#                          dataset_sample_index   0  0  1  2    number of samples all are near it


class BlendTooLarge(ValueError):
    """A blend asks a dataset for more samples than it holds; needed is {dataset: samples}."""

    def __init__(self, message, needed=None):
        super().__init__(message)
        self.needed = needed


class BlendedDataset(_CachedIndices, torch.utils.data.Dataset):
    """Several datasets as one, mixed by weight.  Upstream: BlendedDataset.

    After any number of samples each dataset has given its share of them, give or take a few, so a
    run may be stopped anywhere and has seen the mixture that was asked for.

    datasets   MegatronDatasets of one split, fewer than 32767
    weights    finite numbers >= 0; a dataset of weight 0 is dropped, with a note
    size       samples; None: weights are counts, and dataset d gives exactly weights[d] samples
    ds[i]      {"dataset_id": int16, **the sample}; ds[None] is padding, as of its first dataset
    Raises     BlendTooLarge where upstream would fail in the middle of a run
    """

    def __init__(self, datasets, weights, size, config):
        names = [_name(dataset) for dataset in datasets]
        _check_weights(weights, names)
        _require(size is not None or all(weight == int(weight) for weight in weights),
                 f"without a size, weights are numbers of samples, got {list(weights)}")
        _require(len(datasets) < 32767, f"{len(datasets)} datasets: int16 can name 32766")
        _require((size or 0) >= 0, f"wanted size >= 0, got {size}")
        self.datasets, weights = _drop_zeros(datasets, weights, names)
        self.weights = [int(w) for w in weights] if size is None else normalize(weights)
        self.split, self.config = self.datasets[0].index_split, config
        self.size = size = None if size is None else int(size)
        _describe(self, {"class": type(self).__name__,
                         "datasets": [dataset.unique_identifiers for dataset in self.datasets],
                         "split": self.split.name, "weights": self.weights, "size": size})
        names = "dataset_index", "dataset_sample_index"
        self._prepare_indices(config.path_to_cache, self.split, names)
        if not (config.fast_cache_load or config.defer_npy_index_mmap):
            self._check_sizes()

    def source(self):
        """Nothing: all that a blend is made of is in its description."""
        return {"format": 1}, None

    def _build_arrays(self):
        """Fill both arrays, by weights and size or by counts."""
        size, count = len(self), len(self.datasets)
        which, sample = np.zeros(size, np.int16), np.zeros(size, np.int64)
        if self.size is None:
            build_exhaustive_blending_indices(which, sample, self.weights, count)
        else:
            build_blending_indices(which, sample, self.weights, count, size)
        return [which, sample]

    def _check_sizes(self):
        """BlendTooLarge, before training, where a dataset would run out of samples."""
        taken = np.zeros(len(self.datasets), np.int64)
        for at in range(0, len(self), _CHUNK):
            taken += np.bincount(self.dataset_index[at:at + _CHUNK], minlength=len(taken))
        over = {ds: count for ds, count in zip(self.datasets, taken) if count > len(ds)}
        if over:  # not kept in a local: the traceback would be a cycle that holds all the files
            raise BlendTooLarge("; ".join(
                f"the blend takes {count} samples of {_name(ds)}, which has {len(ds)}"
                for ds, count in over.items()), over)

    dataset_index = property(lambda self: self._index(0), doc="int16 (size,): whose sample it is")
    dataset_sample_index = property(lambda self: self._index(1), doc="int64 (size,): which of them")

    def __len__(self):
        return sum(self.weights) if self.size is None else self.size

    def _batch(self, indices):
        """__getitems__ of this class: each dataset is asked once."""
        places = collections.defaultdict(list)  # dataset -> [(row, index in the dataset), ...]
        for row, i in enumerate(indices):
            d, sample = self._place(i)
            places[d].append((row, sample))
        samples = [None] * len(indices)
        for d, wanted in places.items():
            found = _get_samples(self.datasets[d], [sample for _, sample in wanted])
            for (row, _), sample in zip(wanted, found):
                samples[row] = {"dataset_id": np.int16(d), **sample}
        return samples

    def _place(self, i):
        """Sample i -> (dataset, index in the dataset)."""
        if i is None:
            return 0, None
        i = _position(i, len(self), "the samples of a blend")
        return int(self.dataset_index[i]), int(self.dataset_sample_index[i])


def _drop_zeros(items, weights, names):
    """The items whose weights are not 0, and these weights, with a note that names the others."""
    dropped = [name for name, weight in zip(names, weights) if not weight]
    if dropped:
        log.warning("dropped from the blend, weight 0: %s", ", ".join(map(str, dropped)))
    return [item for item, weight in zip(items, weights) if weight], [*filter(None, weights)]


def _get_samples(dataset, indices):
    """The samples of a list of indices, as one batch where the dataset can."""
    many = getattr(dataset, "__getitems__", None)
    return many(indices) if many else [dataset[i] for i in indices]


# ==============================================================================
# 7. The builder
# ==============================================================================
# Question answered here: which datasets does a config mean, and who builds them first?
#
#   config: blend + split           every corpus is cut by the split matrix, then blended by split
#           blend_per_split         each split has corpora of its own, whole
#           neither                 mock data
#   rank 0: build, write the cache  ->  did it fail?  ->  others: load (or build)  ->  did one fail?
#
# The build is deterministic, so a rank that sees no cache builds its own; nobody waits for a file.
#
#   weights   each corpus is built for                          the blend has
#   given     ceil(ceil(size * w) * (1 + surplus)) samples      sum of ceil(size * w) samples
#   None      one epoch                                         min(size, all of them); all if None
#
# A blend is exact only over a whole run, so in the middle of it a corpus may be drawn a few times
# more than its share: the surplus is for these.  Where it does not suffice (upstream then fails in
# the middle of the run), that corpus alone is built again for as many as are drawn.


class BlendedMegatronDatasetBuilder:
    """Build train, valid and test from a config.  Upstream: BlendedMegatronDatasetBuilder.

    cls               a MegatronDataset class, such as GPTDataset
    sizes             samples wanted of train, valid, test; None: one epoch
    is_built_on_rank  () -> bool; ranks where it is False get None three times

    >>> config = GPTDatasetConfig(1234, 4, blend=([toy_corpus(), toy_corpus()], [1, 3]), split="1",
    ...                           tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> builder = BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config)
    >>> train, valid, test = builder.build()
    >>> [(sample["dataset_id"].item(), bytes(sample["tokens"].tolist())) for sample in train]
    [(1, b'cccc'), (0, b'bbbc'), (1, b'bbbc'), (1, b'aaaa')]
    """

    def __init__(self, cls, sizes, is_built_on_rank, config):
        _require(len(sizes) == len(Split), f"sizes: wanted {len(Split)} entries, got {list(sizes)}")
        self.cls, self.sizes = cls, list(sizes)
        self.is_built_on_rank, self.config = is_built_on_rank, config
        _require(not (config.multiple_validation_sets and config.full_validation)
                 or sizes[Split.valid.value] is None, "full_validation: valid's size must be None")

    def build(self):
        """-> [train, valid, test]: None, a dataset, or (multiple_validation_sets) a list of them.

        With torch.distributed every rank must call it.  A failure on any rank is raised on all.
        """
        if not _is_distributed():
            return self._build()
        datasets, mine = [None] * len(Split), False
        # a gloo group of our own: a build may outlast the timeout of the job's group, and gloo
        # notices at once when a process is gone
        group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(hours=24))
        try:
            for turn in ("ask", "rank 0", "others"):
                error = None
                try:
                    if turn == "ask":
                        mine = self.is_built_on_rank()
                    elif (_rank() == 0) == (turn == "rank 0") and (mine or _rank() == 0):
                        datasets = self._build()
                except Exception as failure:
                    error = failure
                _raise_together(error, group)
        finally:
            error = None  # held here and by its traceback, it would keep all files open
            torch.distributed.destroy_process_group(group)
        return datasets if mine else [None] * len(Split)

    def _build(self):
        """The three modes, on this process alone."""
        blend, matrix = self.config.blend or ([None], None), self.config.split_matrix
        if matrix:
            return self._blend(blend, matrix, self.sizes)
        return [blend and self._build_split(split, *blend)
                for split, blend in zip(Split, self.config.blend_per_split)]

    def _build_split(self, split, prefixes, weights):
        """blend_per_split: the whole of its corpora belongs to this split."""
        matrix = [(0.0, 1.0) if other is split else None for other in Split]
        if len(prefixes) == 1:
            return self._cut(prefixes[0], matrix, self.sizes)[split.value]
        if split is Split.valid and self.config.multiple_validation_sets:
            return [self._cut(prefix, matrix, self.sizes)[split.value] for prefix in prefixes]
        return self._blend((prefixes, weights), matrix, self.sizes)[split.value]

    def _blend(self, blend, matrix, sizes):
        """-> for each split with a place in matrix, the blend of its parts of the corpora."""
        prefixes, weights = blend
        if weights is None and len(prefixes) == 1:
            return self._cut(prefixes[0], matrix, sizes)
        if weights is not None:
            _require(all(size is not None or not bounds for bounds, size in zip(matrix, sizes)),
                     f"a blend with weights needs a size for each split, got {sizes}")
            prefixes, weights = _drop_zeros(prefixes, weights, prefixes)
            weights = normalize(weights)
        surplus = 1 + self.config.mid_level_dataset_surplus
        requests = [[math.ceil(math.ceil((size or 0) * weight) * surplus) for size in sizes]
                    for weight in weights or ()] or [[None] * len(Split)] * len(prefixes)
        with concurrent.futures.ThreadPoolExecutor(self.config.num_dataset_builder_threads) as pool:
            cut = list(pool.map(self._cut, prefixes, itertools.repeat(matrix), requests))
        return [bounds and self._blend_split(split, prefixes, list(parts), weights, size, bounds)
                for split, bounds, size, *parts in zip(Split, matrix, sizes, *cut)]

    def _blend_split(self, split, prefixes, datasets, weights, size, bounds):
        """The blend of one split; a corpus that it would exhaust is built again, larger."""
        if weights is not None:
            size = sum(math.ceil(size * weight) for weight in weights)
        else:
            weights = [len(dataset) for dataset in datasets]
            if size is not None and size > sum(weights):
                warnings.warn(f"{split.name}: {size} samples were asked of corpora that hold "
                              f"{sum(weights)} in one epoch, so the run will end early: give "
                              "weights, to repeat them")
            size = None if size is None else min(size, sum(weights))
        try:
            return BlendedDataset(datasets, weights, size, self.config)
        except BlendTooLarge as error:
            log.warning("rebuilt larger, since %s", str(error))
            needed = error.needed
        matrix = [bounds if other is split else None for other in Split]
        for ds, count in needed.items():  # only these: another num_samples can mean another order
            d = datasets.index(ds)
            datasets[d] = self._cut(prefixes[d], matrix, [count] * len(Split))[split.value]
        return BlendedDataset(datasets, weights, size, self.config)

    def _cut(self, prefix, matrix, sizes):
        """One corpus, opened once -> its part of each split that has a place in matrix."""
        corpus = self.cls.build_low_level_dataset(prefix, self.config)
        n, parts = self.cls.numel_low_level_dataset(corpus), [None] * len(Split)
        for split, bounds, size in zip(Split, matrix, sizes):
            if bounds:
                low, high = split_range(bounds, n)
                _require(n < 2**31, f"{prefix}: {n} sequences, int32 names {2**31 - 1}: split it")
                indices = np.arange(low, high, dtype=np.int32)
                parts[split.value] = self.cls(corpus, prefix, indices, size, split, self.config)
        return parts


def _gather(value, group=None, size=4096):
    """A small JSON-able value of each rank -> the list of all, on every rank; no pickle."""
    device = "cuda" if torch.distributed.get_backend(group) == "nccl" else "cpu"
    text = json.dumps(value).encode().ljust(size)
    _require(len(text) == size, f"{len(text)} bytes are too long for a message of {size}")
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(everyone, mine, group=group)
    return [json.loads(bytes(row.tolist())) for row in everyone]


def _raise_together(error, group):
    """Every rank calls it with its error or None; if one has an error all raise the first, as its
    own class if that is one of these."""
    kinds = (DatasetFormatError, BlendTooLarge, ValueError, TypeError, IndexError, ImportError,
             FileNotFoundError, PermissionError, OSError)
    mine = error and [type(error).__name__, str(error)[:600]]
    for rank, found in enumerate(_gather(mine, group)):
        if found:
            kind = {kind.__name__: kind for kind in kinds}.get(found[0])
            sentence = found[1] if kind else ": ".join(found)
            raise (kind or RuntimeError)(f"rank {rank}: {sentence}") from error


# ==============================================================================
# 8. Samplers, loader, resume
# ==============================================================================
# Question answered here: which samples does rank r get at step t, and after a stop?
#
#   micro_batch_size 2, data_parallel_size 2       global batch 0     global batch 1
#   order of samples                               0  1  2  3         4  5  6  7
#   rank                                           0  0  1  1         0  0  1  1
#
# The order is global, and one number, consumed_samples, says how far it was used.  So a job may go
# on with other ranks, micro-batches or workers, wherever the order does not depend on them:
#
#   sampler                   order                                   may change on resume
#   single, full_validation   0, 1, 2, ...                            ranks, micro-batch, workers
#   cyclic, unsharded         a new shuffle of all, each epoch        ranks, workers; micro-batch if
#                                                                     as many samples are left out
#   cyclic, sharded           each rank shuffles a bucket of its own  workers; micro-batch if the
#                                                                     buckets stay the same


class _Sampler:
    """What the samplers share: sizes, and consumed_samples, where the next pass begins.

    Each has kind, its name in a saved state; check_consumed(consumed), ValueError where no pass can
    begin; and geometry(consumed), what must be equal for a run to go on exactly: the resumed order
    is the saved one if and only if all its values are the same.
    """

    def __init__(self, total_samples, consumed_samples, micro_batch_size, data_parallel_rank,
                 data_parallel_size):
        _require(total_samples > 0, f"no sample to consume: total_samples is {total_samples}")
        for size in (micro_batch_size, data_parallel_size):
            _require(size >= 1, f"micro_batch_size, data_parallel_size must be >= 1, got {size}")
        _require(0 <= data_parallel_rank < data_parallel_size,
                 f"data_parallel_rank must be < {data_parallel_size}, got {data_parallel_rank}")
        self.total_samples, self.consumed_samples = int(total_samples), int(consumed_samples)
        self.micro_batch_size, self.data_parallel_rank = int(micro_batch_size), data_parallel_rank
        self.data_parallel_size = int(data_parallel_size)
        self.micro_batch_times_data_parallel_size = self.micro_batch_size * self.data_parallel_size


class MegatronPretrainingSampler(_Sampler):
    """Samples in order, from consumed_samples on.  Upstream: MegatronPretrainingSampler.

    Yields lists of micro_batch_size indices: of each run of micro_batch_size * data_parallel_size,
    rank r gets the r-th part.  drop_last=False: the tail is shared out, None in the missing places
    (dataset[None] is padding), so that every rank yields as many batches.  A second pass starts at
    0.  len() is the number of batches of the next pass (upstream: of samples).

    >>> list(MegatronPretrainingSampler(6, 0, 1, data_parallel_rank=1, data_parallel_size=2))
    [[1], [3], [5]]
    """

    kind = "single"

    def __init__(self, total_samples, consumed_samples, micro_batch_size, data_parallel_rank,
                 data_parallel_size, drop_last=True):
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank,
                         data_parallel_size)
        self.drop_last = drop_last
        self.check_consumed(consumed_samples)

    def check_consumed(self, consumed_samples):
        """ValueError unless a pass can begin there; at the very end it is an empty one."""
        _require(0 <= consumed_samples <= self.total_samples,
                 f"consumed_samples is {consumed_samples} of {self.total_samples}")

    def __len__(self):
        group = self.micro_batch_times_data_parallel_size
        whole, rest = divmod(self.total_samples - self.consumed_samples, group)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self):
        start, batches, self.consumed_samples = self.consumed_samples, len(self), 0
        group = self.micro_batch_times_data_parallel_size
        for first in range(start, start + batches * group, group):
            yield self._part(first, min(group, self.total_samples - first))

    def _part(self, first, count):
        """This rank's run of a global batch; a short one is shared out as evenly as can be."""
        size, rank, ranks = self.micro_batch_size, self.data_parallel_rank, self.data_parallel_size
        mine = range(first - -rank * count // ranks, first - -(rank + 1) * count // ranks)
        return [*mine] + [None] * (size - len(mine))

    def geometry(self, consumed_samples):
        """What must be equal for a run to go on exactly: nothing but the order itself."""
        return {"consumed": consumed_samples}


class MegatronFullValidationSampler(MegatronPretrainingSampler):
    """One sample a rank a step, to the last one; None where a rank has none left.

    micro_batch_size is taken for the sake of a common signature, and not used.
    """

    kind = "full_validation"

    def __init__(self, total_samples, consumed_samples=0, micro_batch_size=1, data_parallel_rank=0,
                 data_parallel_size=1):
        super().__init__(total_samples, consumed_samples, 1, data_parallel_rank,
                         data_parallel_size, drop_last=False)


class MegatronPretrainingRandomSampler(_Sampler):
    """Samples in a new random order every epoch.  Upstream: MegatronPretrainingRandomSampler.

    data_sharding  True: each rank shuffles a part of its own; False: one order, dealt to the ranks
    seed           the order of epoch e comes from seed + e (upstream: from e)

    The last total_samples % (micro_batch_size * data_parallel_size) samples of each order are left
    out, so that all ranks yield as many batches (upstream: not if unsharded) and stay in the same
    epoch.  Each pass goes on at consumed_samples, which advances with every global batch, across
    epochs; len() is the number of batches left in the epoch.

    >>> list(MegatronPretrainingRandomSampler(None, 8, 0, 1, 0, 1, data_sharding=True))
    [[4], [0], [7], [3], [2], [5], [1], [6]]
    """

    kind = "cyclic"

    def __init__(self, dataset, total_samples, consumed_samples, micro_batch_size,
                 data_parallel_rank, data_parallel_size, data_sharding, seed=0):
        super().__init__(total_samples, consumed_samples, micro_batch_size, data_parallel_rank,
                         data_parallel_size)
        self.dataset, self.data_sharding, self.seed = dataset, data_sharding, int(seed)
        group = self.micro_batch_times_data_parallel_size
        self.active_total_samples = total_samples - total_samples % group
        _require(self.active_total_samples, f"{total_samples} samples: no global batch of {group}")
        self.check_consumed(consumed_samples)

    def check_consumed(self, consumed_samples):
        """ValueError unless a pass can begin there: at a whole number of global batches."""
        group, done = self.micro_batch_times_data_parallel_size, self._epoch(consumed_samples)[1]
        _require(consumed_samples >= 0 and done % group == 0, f"consumed_samples "
                 f"{consumed_samples}: {done} into the epoch, no multiple of global batch {group}")

    def _epoch(self, consumed_samples):
        """-> epoch, samples of it that are done."""
        return divmod(consumed_samples, self.active_total_samples)

    def __len__(self):
        left = self.active_total_samples - self._epoch(self.consumed_samples)[1]
        return left // self.micro_batch_times_data_parallel_size

    def __iter__(self):
        order = self._order(*self._epoch(self.consumed_samples))
        for first in range(0, len(order), self.micro_batch_size):
            self.consumed_samples += self.micro_batch_times_data_parallel_size
            yield order[first:first + self.micro_batch_size].tolist()

    def _order(self, epoch, done):
        """This rank's indices in the rest of an epoch, int64."""
        generator = torch.Generator().manual_seed(self.seed + epoch)
        rank, ranks = self.data_parallel_rank, self.data_parallel_size
        if self.data_sharding:
            bucket = self.active_total_samples // ranks
            return rank * bucket + torch.randperm(bucket, generator=generator)[done // ranks:]
        order = torch.randperm(self._shuffled(), generator=generator)
        return order[done:self.active_total_samples][rank::ranks]

    def _shuffled(self):
        """How many samples the unsharded order is a shuffle of."""
        return self.total_samples - self.total_samples % self.micro_batch_size

    def geometry(self, consumed_samples):
        """What must be equal for a run to go on exactly."""
        epoch, done = self._epoch(consumed_samples)
        order = {"seed": self.seed, "data_sharding": self.data_sharding, "epoch": epoch}
        if not self.data_sharding:
            return order | {"done": done, "of": self._shuffled()}
        return order | {"done": done, "of": self.active_total_samples,
                        "data_parallel_size": self.data_parallel_size}


def fingerprint(dataset):
    """What a resumed run must find again, as a small dict; paths do not count, data does."""
    found = {"class": type(dataset).__name__, "num_samples": len(dataset)}
    if isinstance(dataset, BlendedDataset):
        parts = [fingerprint(part) for part in dataset.datasets]
        return {**parts[0], **found, "size": dataset.size, "weights": _md5(str(dataset.weights)),
                "data": _md5(json.dumps(parts))}
    if isinstance(dataset, MegatronDataset):
        found |= {"split": dataset.index_split.name, "requested": dataset.num_samples,
                  "sequence_length": dataset.config.sequence_length,
                  "random_seed": dataset.config.random_seed}
    if isinstance(dataset, GPTDataset):
        found["data"] = _md5(json.dumps(dataset.source()[0]))
    return found


class PretrainingDataLoader(torch.utils.data.DataLoader):
    """A DataLoader whose position can be saved: it counts the samples of delivered batches.

    state_dict() and load_state_dict(state) are those of torchdata's StatefulDataLoader.  With
    worker processes the sampler runs ahead; the state does not: a batch counts when it is handed
    over, so what was prefetched and not used is read again after a resume.

    dataset         a map-style dataset; None among the indices asks it for padding
    batch_sampler   one of the samplers above
    arguments       as of torch.utils.data.DataLoader
    """

    def __init__(self, dataset, batch_sampler, **arguments):
        super().__init__(dataset, batch_sampler=batch_sampler, **arguments)
        self.consumed_samples = batch_sampler.consumed_samples

    def __iter__(self):
        sampler = self.batch_sampler
        if sampler.kind == "cyclic":
            sampler.consumed_samples = self.consumed_samples  # not where prefetching left it
        start = sampler.consumed_samples
        limit = math.inf if sampler.kind == "cyclic" else sampler.total_samples
        group = sampler.micro_batch_times_data_parallel_size
        for number, batch in enumerate(super().__iter__(), 1):
            self.consumed_samples = min(start + number * group, limit)
            yield batch

    def state_dict(self):
        """A small JSON-able dict, equal on all ranks: how far, in which order, of which data."""
        sampler, consumed = self.batch_sampler, self.consumed_samples
        return {"version": 1, "consumed_samples": consumed, "sampler": sampler.kind,
                "geometry": sampler.geometry(consumed), "dataset": fingerprint(self.dataset)}

    def load_state_dict(self, state, strict=True):
        """Go on where the state was taken.  Ranks, micro-batch size and workers may differ, unless
        the order depends on them.  ValueError names what does not fit (strict=False: go on)."""
        sampler = self.batch_sampler
        try:
            consumed = operator.index(state["consumed_samples"])
            saved = {**state["dataset"], **state["geometry"], "sampler": state["sampler"],
                     "version": state["version"]}
        except (KeyError, TypeError) as error:
            raise ValueError(f"this is no state of a PretrainingDataLoader: {error!r}") from None
        here = {**fingerprint(self.dataset), **sampler.geometry(consumed), "sampler": sampler.kind,
                "version": 1}
        differ = [f"{key} is {here.get(key)!r} here, {saved.get(key)!r} in the state"
                  for key in sorted({*here, *saved}) if here.get(key) != saved.get(key)]
        _require(not differ or not strict, f"the state does not fit: {'; '.join(differ)}")
        sampler.check_consumed(consumed)
        self.consumed_samples = sampler.consumed_samples = consumed


def build_pretraining_data_loader(
        dataset, consumed_samples, *, micro_batch_size, data_parallel_rank=0, data_parallel_size=1,
        dataloader_type="single", data_sharding=True, num_workers=0, full_validation=False,
        drop_last=True, seed=0):
    """A DataLoader of this rank's micro-batches, with state_dict() and load_state_dict().

    dataloader_type   "single": in order; "cyclic": shuffled anew each epoch; "external": dataset
                      is the user's own loader, and is returned as it is
    full_validation   every sample once, one a rank a step
    Returns           PretrainingDataLoader of dicts, (micro_batch_size, ...) each; None for None
    Upstream          build_pretraining_data_loader

    >>> prefix, config = toy_corpus(), GPTDatasetConfig(1234, 4, blend=(["toy"], None), split="1",
    ...     tokenizer=ByteTokenizer(), create_attention_mask=False)
    >>> all_documents = np.arange(3, dtype=np.int32)
    >>> ds = GPTDataset(IndexedDataset(prefix), prefix, all_documents, 3, Split.train, config)
    >>> loader = build_pretraining_data_loader(ds, 0, micro_batch_size=1)
    >>> next(iter(loader))["tokens"], loader.state_dict()["consumed_samples"]
    (tensor([[98, 98, 98, 99]]), 1)
    """
    if dataset is None or dataloader_type == "external":
        return dataset
    _require(dataloader_type in ("single", "cyclic"),
             f"dataloader_type must be single, cyclic or external, got {dataloader_type!r}")
    total = len(dataset)
    common = consumed_samples, micro_batch_size, data_parallel_rank, data_parallel_size
    if full_validation:
        sampler = MegatronFullValidationSampler(total, *common)
    elif dataloader_type == "single":
        sampler = MegatronPretrainingSampler(total, *common, drop_last)
    else:
        sampler = MegatronPretrainingRandomSampler(dataset, total, *common, data_sharding, seed)
    return PretrainingDataLoader(dataset, sampler, num_workers=num_workers,
                                 pin_memory=torch.cuda.is_available(),
                                 persistent_workers=num_workers > 0)


def cyclic_iter(iterable):
    """Yield its items for ever, pass after pass.  One may be empty (a run resumed at the end of an
    epoch); two in a row are a ValueError instead of a hang.

    >>> list(itertools.islice(cyclic_iter([1, 2, 3]), 7))
    [1, 2, 3, 1, 2, 3, 1]
    """
    empty = 0
    while empty < 2:
        empty += 1
        for item in iterable:
            empty = 0
            yield item
    raise ValueError("nothing to iterate over: the loader yielded no batch in two passes")


class RerunDataIterator:
    """An iterator whose last micro-batches can be had again.  Upstream: RerunDataIterator.

    rewind() goes back to the last advance(); advance() forgets what was read until now.

    >>> numbers = RerunDataIterator(range(9))
    >>> next(numbers), next(numbers), numbers.rewind(), next(numbers), next(numbers)
    (0, 1, None, 0, 1)
    >>> numbers.advance(), next(numbers), numbers.rewind(), next(numbers)
    (None, 2, None, 2)
    """

    def __init__(self, iterable):
        self.iterable, self._source = iterable, iter(iterable)
        self._saved, self._at = [], 0

    def __iter__(self):
        return self

    def __next__(self):
        if self._at == len(self._saved):
            self._saved.append(next(self._source))
        self._at += 1
        return self._saved[self._at - 1]

    def rewind(self):
        """Yield again all that came since the last advance()."""
        self._at = 0

    def advance(self):
        """The step is done: what was read is not needed any more."""
        del self._saved[:self._at]
        self._at = 0


def get_train_valid_test_num_samples(*, global_batch_size, eval_interval, eval_iters,
                                     train_iters=None, train_samples=None, full_validation=False):
    """(train, valid, test) samples that a run needs; valid is None with full_validation.

    Evaluations, of eval_iters global batches each, come every eval_interval iterations and once at
    the end; the test set is used once.  Give the length of the run as train_iters or as
    train_samples.  Upstream: get_train_valid_test_num_samples.

    >>> get_train_valid_test_num_samples(global_batch_size=8, train_iters=100, eval_interval=50,
    ...                                  eval_iters=2)
    (800, 48, 16)
    """
    _require((train_iters is None) != (train_samples is None),
             f"give train_iters or train_samples, got {train_iters} and {train_samples}")
    for size in (global_batch_size, eval_interval):
        _require(size >= 1, f"global_batch_size and eval_interval must be >= 1, got {size}")
    if train_samples is None:
        train_samples = train_iters * global_batch_size
    evaluations = train_samples // global_batch_size // eval_interval + 1
    valid = None if full_validation else evaluations * eval_iters * global_batch_size
    return train_samples, valid, eval_iters * global_batch_size


class NumMicroBatches:
    """Micro-batches a step, constant or ramped up.  Upstream: num_microbatches_calculator.

    global_batch_size  samples a step, over all data-parallel ranks
    rampup_batch_size  (start, increment, samples): the global batch grows from start to
                       global_batch_size in equal steps of increment over so many samples
    ValueError if a global batch on the way is not a whole number of micro-batches on every rank.

    >>> ramp = NumMicroBatches(32, 4, 2, rampup_batch_size=(16, 8, 100))
    >>> [(ramp.update(consumed), ramp.get(), ramp.get_current_global_batch_size())[1:]
    ...  for consumed in (0, 50, 101)]
    [(2, 16), (3, 24), (4, 32)]
    """

    def __init__(self, global_batch_size, micro_batch_size, data_parallel_size,
                 rampup_batch_size=None):
        self.global_batch_size, self.unit = global_batch_size, micro_batch_size * data_parallel_size
        ramp = rampup_batch_size or (global_batch_size, 1, 0)
        _require(len(ramp) == 3, f"rampup_batch_size is (start, increment, samples), got {ramp}")
        self.start, self.step, self.samples = ramp
        whole = self.step >= 1 and (global_batch_size - self.start) % self.step == 0
        _require(whole and 1 <= self.start <= global_batch_size and self.samples >= 0, f"ramp-up "
                 f"{rampup_batch_size}: wanted whole steps from >= 1 to {global_batch_size}")
        for size in range(self.start, global_batch_size + 1, self.step):
            _require(self.unit >= 1 and size % self.unit == 0, f"global batch {size} is no "
                     f"multiple of micro_batch_size * data_parallel_size, {self.unit}")
        self.update(0)

    def update(self, consumed_samples):
        """Set the batch size of the step that begins after so many samples."""
        self._current = self.global_batch_size
        steps = (self.global_batch_size - self.start) // self.step
        if steps and self.samples and consumed_samples <= self.samples:
            done = int(consumed_samples / (self.samples / steps))
            self._current = self.start + done * self.step

    def get(self):
        """Micro-batches of the current step."""
        return self._current // self.unit

    def get_current_global_batch_size(self):
        """Samples of the current step."""
        return self._current


def check_data_consistency(consumed_samples, group=None):
    """ValueError on every rank if the ranks of group do not agree on consumed_samples."""
    found = _gather(int(consumed_samples), group) if _is_distributed() else [consumed_samples]
    _require(len({*found}) == 1, f"the ranks disagree on consumed_samples, {found}: they would "
             "train on some samples twice or never")


# ==============================================================================
# 9. The command line
# ==============================================================================
# Question answered here: how is all this run from a shell?
#
#   megatron-min preprocess --input 'books/*.jsonl' --output-prefix books --append-eod --workers 8
#   megatron-min merge      --input books_text_document wiki_text_document --output-prefix all
#   megatron-min inspect    all --tokenizer tokenizer.json
#   megatron-min verify     all
#   megatron-min build      --blend 70 books 30 wiki --split 98,1,1 --sizes 1000000 1000 1000
#                           --sequence-length 2048 --random-seed 1234 --path-to-cache cache
#   megatron-min demo
#
# Each command is a function of its options; its docstring is its help.  What a user can
# get wrong ends as one sentence on stderr and exit code 1; a traceback would be a bug of ours.  The
# caches that build makes are hit by a job whose tokenizer has the same unique_identifiers.


def _command_preprocess(tokenizer, eod_token, **options):
    """JSONL, plain or gzip, to .bin/.idx pairs"""
    made = preprocess(tokenizer=build_tokenizer(tokenizer, eod_token), verbose=True, **options)
    for prefix in made.values():
        _print_counts(prefix)


def _print_counts(prefix, label="", check=None):
    """One line about a pair, which is opened and returned."""
    ds = IndexedDataset(prefix, check=check)
    print(f"{label}{prefix}: {len(ds):,} sequences, {len(ds.document_indices) - 1:,} documents, "
          f"{ds.num_tokens:,} tokens of {np.dtype(ds.dtype)}")
    return ds


def _command_merge(input, output_prefix, multimodal):
    """append pairs into a new pair"""
    merge(input, output_prefix, multimodal)
    _print_counts(output_prefix)


def _command_inspect(prefix, tokens, tokenizer, eod_token):
    """header, counts, lengths and first tokens of a pair"""
    decoder, ds = build_tokenizer(tokenizer, eod_token), _print_counts(prefix, check=False)
    print(f"version 1, dtype code {DType.code_from_dtype(ds.dtype)}")
    if len(ds):
        lengths = ds.sequence_lengths[::-(-len(ds) // _CHUNK)]  # no need to read a billion
        marks = zip(("min", "1%", "25%", "median", "75%", "99%", "max"),
                    np.percentile(lengths, (0, 1, 25, 50, 75, 99, 100)))
        print(f"lengths of {len(lengths):,} sequences:", *(f"{k} {v:,.0f}" for k, v in marks))
        first = ds[0][:max(0, tokens)].tolist()
        print(f"sequence 0: {first}")
        with contextlib.suppress(Exception):  # ids of another tokenizer, most often
            print(f"decoded:    {decoder.detokenize(first)!r}")


def _command_verify(prefix):
    """check the whole .idx, and that the .bin fits"""
    for path in prefix:
        _print_counts(path, "whole: ", check=True)


def _command_build(sizes, tokenizer, eod_token, blend, **fields):
    """make the index caches of a blend ahead of a job"""
    per_split = [get_blend_from_list(fields.pop(f"{split.name}_blend")) for split in Split]
    config = GPTDatasetConfig(
        blend=get_blend_from_list(blend), blend_per_split=per_split if any(per_split) else None,
        tokenizer=build_tokenizer(tokenizer, eod_token), **fields)
    log.setLevel(logging.INFO)
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    for split, found in zip(Split, built):
        for ds in found if isinstance(found, list) else [found]:
            print(f"{split.name}: " + ("none" if ds is None else f"{len(ds):,} samples of "
                  f"{config.sequence_length} tokens, {ds.unique_description_hash}"))


def _add_config_arguments(add):
    """One flag for each field of GPTDatasetConfig, with the field's name and default."""
    for field in dataclasses.fields(GPTDatasetConfig):
        kind = getattr(field.type, "__args__", [field.type])[0]  # of "str | None": str
        if field.init and kind in (bool, int, float, str):
            how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
            add("--" + field.name.replace("_", "-"), default=argparse.SUPPRESS,
                required=field.default is dataclasses.MISSING, **how)
    for name in ("", *(f"{split.name}-" for split in Split)):
        add(f"--{name}blend", nargs="+", metavar="[WEIGHT] PREFIX")


def _parser():
    """The commands and their flags."""
    parser = argparse.ArgumentParser("megatron-min", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version",
                        version=f"megatron-min {__version__} (kernels: {IMPLEMENTATION})")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    def command(function, tokenizer=False):
        """A parser for the command -> the method that adds arguments to it."""
        name, text = function.__name__.removeprefix("_command_"), function.__doc__
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(function=function)
        if tokenizer:
            sub.add_argument("--tokenizer", default="bytes",
                             help="bytes, null:VOCAB, a tokenizer.json or module:attribute")
            sub.add_argument("--eod-token", help="text of a tokenizer.json's end-of-document token")
        return sub.add_argument

    add = command(_command_preprocess, tokenizer=True)
    add("--input", nargs="+", required=True, help="files, globs, or - for stdin")
    add("--output-prefix", required=True, help="<prefix>_<key>_document.bin/.idx are written")
    add("--json-keys", nargs="+", default=["text"])
    add("--append-eod", action="store_true", help="end each document with the eod token")
    add("--workers", type=int, default=1, help="processes; any number gives the same files")
    add("--on-error", choices=("stop", "skip"), default="stop", help="what to do at a bad line")
    add = command(_command_merge)
    add("--input", nargs="+", required=True, metavar="PREFIX")
    add("--output-prefix", required=True)
    add("--multimodal", action="store_true", help="the pairs hold modes")
    add = command(_command_inspect, tokenizer=True)
    add("prefix")
    add("--tokens", type=int, default=16, help="how many tokens of sequence 0 to show")
    command(_command_verify)("prefix", nargs="+")
    add = command(_command_build, tokenizer=True)
    add("--sizes", nargs=3, required=True, metavar=("TRAIN", "VALID", "TEST"), help="samples, or "
        "none for one epoch", type=lambda text: None if text == "none" else int(text))
    _add_config_arguments(add)
    command(_command_demo)("--keep", metavar="FOLDER", help="work there and leave the files")
    return parser


def _command_demo(keep):
    """real text to blended, resumable batches, in a few seconds"""
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or temporary
        os.makedirs(folder, exist_ok=True)
        _demo_batches(folder, _demo_blend(folder, _demo_pairs(folder)))


def _demo_pairs(folder):
    """The standard library's modules as one corpus, its docstrings as another -> {name: prefix}."""
    paths = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*.py")))[:150]
    code = [pathlib.Path(path).read_text("utf-8", "replace") for path in paths]
    nodes = itertools.chain.from_iterable(ast.walk(ast.parse(text)) for text in code)
    defined, prefixes = (ast.Module, ast.ClassDef, ast.FunctionDef), {}
    docs = [ast.get_docstring(node) for node in nodes if isinstance(node, defined)]
    print("1. Text to tokens: the modules of Python's library, and their docstrings.  A byte of "
          "UTF-8 is\n   a token, 256 ends a document, and a token takes 2 bytes (uint16).")
    for name, texts in (("code", code), ("docs", [*filter(None, docs)])):
        path = os.path.join(folder, f"{name}.jsonl")
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        pathlib.Path(path).write_text("".join(lines), "utf-8")
        prefix = prefixes[name] = preprocess(path, f"{folder}/{name}", append_eod=True)["text"]
        sizes = [os.path.getsize(path) for path in (get_bin_path(prefix), get_idx_path(prefix))]
        n, size = len(texts), sum(len(text.encode()) for text in texts)
        print(f"   {name}.jsonl: {n} documents, {size} bytes of UTF-8, beginning "
              f"{texts[0][:20]!r}\n     .bin {sizes[0]:9} bytes = ({size} + {n}) x 2\n"
              f"     .idx {sizes[1]:9} bytes = 34 + {n} x (4 + 8) + {n + 1} x 8")
    return prefixes


def _demo_blend(folder, prefixes, size=600, length=256):
    """Two pairs -> train, valid and test of their blend, and the numbers behind them -> train."""
    config = GPTDatasetConfig(
        1234, length, blend=([*prefixes.values()], [70, 30]), split="90,5,5",
        tokenizer=ByteTokenizer(), create_attention_mask=False, path_to_cache=f"{folder}/cache")
    sizes = [size, 40, 40]
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    train = built[0]
    print(f"\n2. Blend: 70 % code, 30 % docs, split 90,5,5; {sizes} samples of {length} tokens")
    for d, (name, part) in enumerate(zip(prefixes, train.datasets)):
        tokens, epochs = part.tokens_per_epoch(), part.geometry().num_epochs
        print(f"   {name}: its first {len(part.indices)} documents train, {tokens} tokens\n     "
              f"asked for ceil(ceil({size} x {train.weights[d]}) x 1.005) = {part.num_samples}\n"
              f"     {epochs} epoch(s) give ({epochs} x {tokens} - 1) // {length} = {len(part)}\n"
              f"     the blend takes {int((train.dataset_index == d).sum())} of them")
    print("   the blend begins", *([*prefixes][d] for d in train.dataset_index[:10]))
    print("   lengths:", ", ".join(f"{split.name} {len(ds)}" for split, ds in zip(Split, built)))
    return train


def _demo_global_batches(dataset, ranks, micro_batch_size, state=None):
    """The loaders of all ranks, and their batches put together in rank order: (global batch, S)."""
    loaders = [build_pretraining_data_loader(
        dataset, 0, micro_batch_size=micro_batch_size, data_parallel_rank=rank,
        data_parallel_size=ranks) for rank in range(ranks)]
    for loader in loaders if state else ():
        loader.load_state_dict(state)
    return loaders, (torch.cat([batch["tokens"] for batch in step]) for step in zip(*loaders))


def _demo_batches(folder, train, steps=5):
    """Batches on two ranks, a stop, and the same batches going on with four."""
    loaders, batches = _demo_global_batches(train, 2, 4)
    seen = [next(batches) for _ in range(steps)]
    note = pathlib.Path(folder, "loader.json")
    note.write_text(json.dumps(loaders[0].state_dict(), indent=1), "utf-8")
    state = json.loads(note.read_text("utf-8"))
    print("\n3. Batches: 2 data-parallel ranks, micro-batches of 4: a global batch is 8 samples\n"
          "   step 0: rank 0 gets samples 0 1 2 3, rank 1 gets 4 5 6 7; step 1: 8 .. 11, 12 .. 15\n"
          f"   sample 0 begins {ByteTokenizer().detokenize(seen[0][0])[:60]!r}\n   stopped after "
          f"{steps} steps: {steps} x 8 = {state['consumed_samples']} samples, noted in loader.json")
    wanted, rest = list(batches), list(_demo_global_batches(train, 4, 2, state)[1])
    equal = len(rest) == len(wanted) and all(map(torch.equal, rest, wanted))
    print("\n4. Resume: 4 ranks, micro-batches of 2: the same global batch, so the batches go on\n"
          f"   {steps} steps before + {len(rest)} after = {steps + len(rest)} = {len(train)} // 8\n"
          f"   the {len(rest)} batches of 4 ranks equal those that 2 ranks would have had: {equal}")
    _require(equal, "the resumed batches differ: this is a bug of megatron_min", RuntimeError)


def _stop(*_):
    """At SIGTERM: end the workers, for which the exit would wait, and remove what is half done."""
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.exit(143)


def main(argv=None):
    """Run a command of megatron-min -> exit code."""
    options = vars(_parser().parse_args(argv))
    logging.basicConfig(format="%(message)s")
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _stop)
    try:
        options.pop("function")(**options)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # the reader had enough, as in "demo | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except (Exception, KeyboardInterrupt) as error:
        known = isinstance(error, (ValueError, LookupError, OSError, ImportError))
        sentence = " ".join(str(error).split())
        sentence = sentence if known and sentence else f"{type(error).__name__}: {sentence}"
        print(f"megatron-min: {sentence.rstrip(': ')}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


# all that is public and made here: not the modules that were imported
__all__ = [name for name, value in globals().items()
           if name[0] != "_" and getattr(value, "__module__", "") == __name__]

if __name__ == "__main__":
    sys.exit(main())
