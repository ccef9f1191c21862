#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Put faults into megatron_min.py and _helpers.c, one at a time: does the suite notice each?

    python .ci/mutate.py                  all faults, two suites side by side: hours
    python .ci/mutate.py 12 C             the faults of section 12 and of the C file
    python .ci/mutate.py --own 12         try the tests of section 12 alone: minutes
    python .ci/mutate.py --check          only see that each fault still fits the text
    python .ci/mutate.py --jobs 8         eight suites side by side

A fault is noticed if a test fails, or does not end.  The tests of the fault's own section come
first, and the whole quick suite where these pass.  Those that survive are listed, and more than a
tenth of survivors is an error.  Run by hand, when tests were changed; not by the gate.
"""

import argparse
import concurrent.futures
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

TREE = pathlib.Path(__file__).resolve().parent.parent
SECONDS = 600  # more than the suite takes: a fault that makes a loop endless is noticed, too

# {section of megatron_min.py, or "C": [(old text, new text), ...]}.  The old text occurs once in
# its section, or in the C file.
FAULTS = {
    "1": [
        ("if pair.startswith(stem)]", "if pair == stem]"),
        ("difflib.get_close_matches(stem, pairs)", "[]"),
        ("if folder and not os.path.isdir(folder):", "if False:"),
        ('struct.Struct("<9sQBQQ")', 'struct.Struct(">9sQBQQ")'),
        ("_VERSION = 1", "_VERSION = 2"),
        ("float64 = 6", "float64 = 7"),
        ("float32 = 7", "float32 = 6"),
        ("cardinality < 65500", "cardinality <= 65500"),
        ("sum(lengths) != num_tokens or", "False or"),
        ("min(lengths) < 0", "min(lengths) < -9"),
        ("len(modes) != len(lengths)", "False"),
        ("self.sequence_modes.extend(modes)", "pass"),
        (
            "self.document_indices.extend([first + end for end in ends])",
            "self.document_indices.extend(ends)",
        ),
        ("        self.sequence_lengths.extend(lengths)\n", "        pass\n"),
        ("os.path.realpath(source) == os.path.realpath(self._bin.path)", "False"),
        ("other.dtype != self.dtype", "False"),
        ("len(other._idx_content) > without_modes", "False"),
        ("document_indices[1:] + before", "document_indices[1:]"),
        (
            "self.sequence_modes.frombytes(other.sequence_modes.tobytes())",
            "self.sequence_modes.extend(bytes(len(other)))",
        ),
        ("len(self.sequence_lengths) != self.document_indices[-1]", "False"),
        (
            "(np.cumsum(lengths, dtype=np.int64) - lengths) *",
            "np.cumsum(lengths, dtype=np.int64) *",
        ),
        (
            "            index.discard()  # does nothing once",
            "            pass  # does nothing once",
        ),
        ("            self._bin.discard()", "            pass"),
        ("if self._bin.file.closed:", "if False:"),
        ("if kind is None and not", "if not"),
        ("tokens != ids", "tokens != tokens"),
        ('ids.dtype.kind not in "biu"', "False"),
        ("len(content) < _HEADER.size", "len(content) < 0"),
        ("if magic != _MAGIC or version", "if version"),
        ("_MAGIC or version != _VERSION", "_MAGIC"),
        ("not 1 <= code <= 8", "not 0 <= code <= 8"),
        ("if ends != [0, n]:", "if ends[1:] != [n]:"),
        ("if ends != [0, n]:", "if ends[:1] != [0]:"),
        (
            "if self.multimodal and found != with_modes:",
            "if False:",
        ),
        ("if found not in (without_modes, with_modes):", "if found < without_modes:"),
        ("if found != end:", "if found < end:"),
        ("if fast_cache_load and check is None:", "if False:"),
        ("if fast_cache_load and check is None:", "if fast_cache_load:"),
        ("if found != end:", "if found > end:"),
        ("if end % self._token_bytes:", "if False:"),
        (
            "if file_stamp(idx_path) != self._idx_stamp:",
            "if False:",
        ),
        ("if check or (check is None", "if (check is None"),
        ("< _SMALL_INDEX_BYTES):", "< 0):"),
        ("(lengths < 0) | (pointers", "(pointers"),
        ("(lengths < 0) | (pointers != wanted)", "lengths < 0"),
        ("            end = ends[-1]\n", "            end = end\n"),
        ("found[1:] < found[:-1]", "found[1:] < 0"),
        ("low + _CHUNK + 1]", "low + _CHUNK]"),
        ("self._verify_documents()\n        self._verified", "self._verified"),
        ("if idx.step not in (None, 1):", "if False:"),
        ("return tokens, self.sequence_modes[i]", "return tokens, self.sequence_modes[0]"),
        ("return sequences, self.sequence_modes[idx]", "return sequences, self.sequence_modes"),
        ("start + size > self.num_tokens", "False"),
        ("if rest or start < 0", "if start < 0"),
        ("offset + length > size", "False"),
        ("if offset < 0 or length < 0", "if length < 0"),
        ("return start + offset, length", "return start, length"),
        ('"idx_mtime_ns": self._idx_stamp["changed"],', ""),
        ('"idx_ends": _md5(first + last),', '"idx_ends": 0,'),
        ("_md5(first + last)", "_md5(first)"),
        ("return file_exists(get_idx_path(path_prefix)) and", "return"),
        ("if not -n <= i < n:", "if not -n <= i <= n:"),
        ("self.multimodal, self.mmap\n", "self.multimodal, True\n"),
        (
            "self._check_open()\n        self.document_indices.append(len(self.sequence_lengths))",
            "self._check_open()",
        ),
        (
            "lengths, modes)\n        self.document_indices.append(len(self.sequence_lengths))",
            "lengths, modes)",
        ),
        (
            "self.sequence_lengths.append(len(tokens) //",
            "self.sequence_lengths.append(len(tokens) or",
        ),
        ("num_tokens = len(tokens) //", "num_tokens = len(tokens) or"),
        ("if in_order != sorted(in_order):", "if False:"),
        ("if isinstance(prefixes, (str, os.PathLike)):", "if isinstance(prefixes, str):"),
        ("if not prefixes:", "if False:"),
        ('dtype.kind == "f" or len(ids) == 0:', 'dtype.kind == "f":'),
    ],
    "2": [
        ("                if line.isspace():\n", "                if False:\n"),
        ("if token < 256", "if token <= 256"),
        ("append_eod and len(sequences) > 0", "append_eod"),
        ("sequences[-1].append(tokenizer.eod)", "sequences[0].append(tokenizer.eod)"),
        ("        if len(tokens) > 0:\n", "        if True:\n"),
        ("[text] if isinstance(text, str) else text", "[text]"),
        ("                builder.end_document()  #", "                pass  #"),
        ("DType.optimal_dtype(tokenizer.vocab_size)", "np.int32"),
        ('errors="replace"', 'errors="strict"'),
        ("json.loads(line)[json_key]", 'json.loads(line)["text"]'),
        ('open(input_path, "rb")', "open(input_path)"),
        (
            "is None:\n        tokenizer = ByteTokenizer()",
            "is None:\n        tokenizer = NullTokenizer(9)",
        ),
    ],
    "3": [
        ("or len(phases) == 0:", "or False:"),
        ("or len(phase) != 2:", "or False:"),
        ("or samples < 1:", "or samples < 0:"),
        ("weights[is_used] = normalize(weights[is_used])", "pass"),
        (
            "if self.split_matrix is not None and self.split_matrix[Split.train.value] is None:",
            "if False:",
        ),
        ("missing = len(Split) - len(shares)", "missing = 0"),
        ("min(shares) < 0 or", "False or"),
        ("[+-]?([0-9]+", "[+-]?([0-9_]+"),
        ("return number if math.isfinite(number) else None", "return number"),
        ("begin = max(edges_a[k], edges_b[k])", "begin = edges_a[k]"),
        ("end = min(edges_a[k + 1], edges_b[k + 1])", "end = edges_a[k + 1]"),
        ("if begin < end else None", "if begin <= end else None"),
        ("round(begin * float(num_sequences))", "int(begin * float(num_sequences))"),
        ("round(end * float(num_sequences))", "math.ceil(end * float(num_sequences))"),
        ("entries[1::2], [float", "entries[0::2], [float"),
        ("if not entries or is_number !=", "if is_number and is_number !="),
        ("if len(weights) != len(names):", "if False:"),
        ("not 0 <= number <= sys.float_info.max", "not 0 <= number"),
        ("not 0 <= number <= sys", "not number <= sys"),
        ("if not 0 < total < math.inf:", "if False:"),
        ("        if weight:\n            kept", "        if True:\n            kept"),
        (
            'self._check_whole_number("random_seed", 0)',
            'self._check_whole_number("random_seed", 1)',
        ),
        (
            'self._check_whole_number("sequence_length", 1)',
            'self._check_whole_number("sequence_length", 0)',
        ),
        ("or not 0 <= surplus < math.inf", "or not 0 <= surplus"),
        ("or not 0 <= surplus < math.inf", "or not surplus < math.inf"),
        ("not isinstance(surplus, numbers.Real) or", "False or"),
        ("    if len(edges_a) != len(edges_b):\n", "    if False:\n"),
        (
            "if isinstance(blend, str) or not isinstance(blend, coll",
            "if not isinstance(blend, coll",
        ),
        ("            number = weight.item()\n", "            pass\n"),
        ("if isinstance(weights, str) or not hasattr", "if not hasattr"),
        ("not any(self.blend_per_split):", "False:"),
        ("not lowest <= value < 2**32", "not lowest <= value"),
        ("setattr(self, name, int(value))", "pass"),
        ('self.split = "1,1,1"', 'self.split = "1,0,0"'),
        ("if self.multiple_validation_sets:", "if False:"),
        ("if self.tokenizer is None:", "if False:"),
        ("if self.reset_attention_mask and not", "if False and not"),
        ("mid_level_dataset_surplus: float = 0.005", "mid_level_dataset_surplus: float = 0.05"),
        (
            "self.create_attention_mask and not self.inter_document_masking",
            "self.create_attention_mask",
        ),
        (
            "stable_order: bool = dataclasses.field(default=False, kw_only=True)",
            "stable_order: bool = False",
        ),
        ("number = _number(weight.strip())", "pass"),
        ("            weights = _read_weights(weights, prefixes)\n", "            pass\n"),
        (
            "weights = np.array(weights, np.float64)\n    is_used",
            "weights = np.array(weights)\n    is_used",
        ),
        ("self.blend = self._read_blend(self.blend)", "self._read_blend(self.blend)"),
        ("if self.hybrid_context_parallel:", "if False:"),
        ("isinstance(prefixes, str) or", "False or"),
        ("if len(self.blend_per_split) != len(Split):", "if False:"),
        ("if self.blend is not None or self.split is not None:", "if self.split is not None:"),
    ],
    "4": [
        ("random_state.seed([random_seed, epoch])", "random_state.seed(random_seed + epoch)"),
        ("            random_state.seed([random_seed, epoch])\n", "            pass\n"),
        ("if epoch > 0:", "if epoch >= 0:"),
        ("first_document = epoch * num_documents", "first_document = 0"),
        ("sample_edges[epoch] : sample_edges[epoch + 1]", ": sample_edges[epoch + 1]"),
        ("return [*edges, plan.num_samples]", "return [*edges, plan.num_samples - 1]"),
        (
            "count_samples(tokens, sequence_length, True,",
            "count_samples(tokens, sequence_length, False,",
        ),
        ("if rest and not drop_last_partial_sequence:", "if rest and drop_last_partial_sequence:"),
        ("max(0, tokens - int(add_extra_token_to_sequence))", "max(0, tokens)"),
        ("if num_samples is not None and num_samples < 0:", "if False:"),
        ("if num_samples and not tokens_per_epoch:", "if False:"),
        ("_ceil_div(num_samples * S + x, tokens", "_ceil_div(num_samples * S, tokens"),
        ("int(0.80 *", "int(0.81 *"),
        ("< int(0.80", "<= int(0.80"),
        ("(tokens_per_epoch - x) // S", "tokens_per_epoch // S"),
        (
            "count_samples(all_tokens - tokens_per_epoch, S, True, x)",
            "count_samples(all_tokens - tokens_per_epoch, S, drop_last_partial_sequence, x)",
        ),
        ("return -(-a // b)", "return a // b"),
        ("    random_state.shuffle(items)\n", "    random_state.shuffle(items[1:])\n"),
        ("edge = len(document_index) - len(documents)", "edge = len(documents)"),
        (
            "    shuffle(document_index[edge:], random_state)\n",
            "",
        ),
        ("np.arange(1, num_samples + 1) * S + x", "np.arange(1, num_samples + 1) * S"),
        ("tokens_read[-1] = tokens_needed", "pass"),
        ("np.searchsorted(ends, tokens_read)", 'np.searchsorted(ends, tokens_read, "right")'),
        ("rows[1:, 1] = tokens_read - x -", "rows[1:, 1] = tokens_read -"),
        ("if tokens_needed < num_samples * S and not x:", "if False:"),
        ("if len(ends) and ends[-1] < tokens_needed:", "if False:"),
        ("(documents < 0) | (documents >= len(sizes))", "documents >= len(sizes)"),
        ("(documents < 0) | (documents >= len(sizes))", "documents < 0"),
        ("if len(lengths) and lengths.min() < 0:", "if False:"),
        ("return np.uint32 if", "dtype = np.int64 if"),
        (
            "shuffle(shuffle_index[:num_samples], random_state)",
            "shuffle(shuffle_index, random_state)",
        ),
        ("    shuffle(shuffle_index[num_samples:], random_state)\n", ""),
        ("if values.ndim != 1:", "if False:"),
        ("if found != dtype:", "if False:"),
        (
            "np.asarray(documents, np.int32), num_epochs)",
            "np.asarray(documents), num_epochs)",
        ),
        ("tokens = int(num_epochs) * int(tokens_per_epoch)", "tokens = int(tokens_per_epoch)"),
        ("documents.max() >= 2**31:", "documents.max() >= 2**32:"),
    ],
    "5": [
        ('"split_matrix", "tokenizer"]', '"split_matrix"]'),
        ('["random_seed", "sequence_length",', '["sequence_length",'),
        ("or highest >= n or", "or"),
        ("if lowest < 0 or", "if"),
        ('if dtype.kind not in "iu":', "if False:"),
        ("if last_tokens and self._eod_token_id not in last_tokens:", "if False:"),
        ("index_split is Split.valid and not config", "not config"),
        ("            self.dataset.verify()\n", "            pass\n"),
        ("np.random.RandomState(config.random_seed)", "np.random.RandomState(0)"),
        ("self.config.stable_order and not self._keep_partial", "self.config.stable_order"),
        ('corrections["stable_order"] = True', "pass"),
        ("if config.stable_order:", "if False:"),
        (
            "first_part = plan.samples_before_final_epoch",
            "first_part = plan.num_samples",
        ),
        ("lengths[first:end] if digest is None else lengths[self.indices]", "lengths[first:end]"),
        ("return len(self.sample_index) - 1", "return len(self.sample_index)"),
        ("begin = first_offset if d == first_d else 0", "begin = 0"),
        ("last_offset + self._extra", "last_offset"),
        ("if not 0 <= i < len(self.dataset):", "if not i < len(self.dataset):"),
        ("if not 0 <= j < most:", "if not j < most:"),
        ("or first_offset < 0 or last_offset < 0:", "or last_offset < 0:"),
        (
            '            sample = self[0]\n            sample["loss_mask"].zero_()\n',
            "            sample = self[0]\n",
        ),
        ('                sample["loss_mask"].zero_()\n', "                pass\n"),
        ("if not is_remote(prefix):", "if True:"),
        (
            "ObjectStorageConfig().folder if storage is None else storage.folder",
            "ObjectStorageConfig().folder",
        ),
        ("if cls.__getitem__ is not GPTDataset.__getitem__:", "if False:"),
        ("if cls._query_document_sample_shuffle_indices is not query:", "if False:"),
        ("return self._reads_many() and not self.dataset.is_mapped", "return False"),
        ("pieces.append((i, length - 1, 1))", "pieces.append((i, 0, 1))"),
        ("storage = ObjectStorageConfig(config.object_storage_cache_path)", "storage = None"),
        ("tokens[tokens == self._pad_token_id] = 0", "pass"),
        ("labels[labels == self._pad_token_id] = 0", "pass"),
        ("if (token_ids == self._pad_token_id).any():", "if False:"),
        ("(labels != self._pad_token_id)", "(tokens != self._pad_token_id)"),
        (
            "loss_mask[tokens == self._eod_token_id] = 0",
            "loss_mask[labels == self._eod_token_id] = 0",
        ),
        ("return [0, *(eods + 1).tolist()]", "return [0, *eods.tolist()]"),
        ("np.flatnonzero(tokens[:-1] == self", "np.flatnonzero(tokens == self"),
        ("if length and 0 < size <", "if 0 < size <"),
        ("0 < size < self.config.sequence_length", "0 < size <= self.config.sequence_length"),
        ("np.full(S + 1, S, np.int32)", "np.full(S + 1, 0, np.int32)"),
        ("np.diff([*starts, S]).max()", "np.diff([0, *starts]).max(initial=0)"),
        ('corrections["add_extra_token_to_sequence"] = False', "pass"),
        ('corrections["drop_last_partial_validation_sequence"] = False', "pass"),
        ('corrections["documents"] = self._documents', "pass"),
        (
            "np.triu(np.ones((sequence_length, sequence_length), bool), 1)",
            "np.triu(np.ones((sequence_length, sequence_length), bool), 0)",
        ),
        ("mask |= document[:, None] != document[None, :]", "pass"),
        ("positions -= np.repeat(starts, lengths)", "pass"),
        ("return [first, end, _md5(str(indices.tolist()))]", "return [first, end, None]"),
        ("except NotImplementedError:", "except KeyError:"),
        ('if name != "pad_token"', "if True"),
        ('("eos", "eod")', '("eod",)'),
        (
            "        if own is GPTDataset._build_document",
            "        if own is not GPTDataset._build_document",
        ),
        ('self._cache["shuffle_index"] = values', "pass"),
        ('self._cache["sample_index"] = values', "pass"),
        ("        return self._pad(idx, token_ids)\n", "        return token_ids\n"),
        (
            "        if not self._extra:\n            labels",
            "        if False:\n            labels",
        ),
        ("labels = padded[1:].copy()", "labels = padded[1:]"),
        (
            "        self._pad_token_id = _pad_token_id(config)\n",
            "        self._pad_token_id = -1\n",
        ),
        ("if same and not config.allow_ambiguous_pad_tokens:", "if same:"),
        ("generator.integers(1, 4096,", "generator.integers(1, 4095,"),
        ("numbers_up % self.tokenizer.vocab_size", "numbers_up"),
        ("if digest is None:\n            state", "if False:\n            state"),
        (
            "        if sequence is None:\n            sequence = path_prefix\n        elif",
            "        if sequence is None:\n            sequence = 0\n        elif",
        ),
        ("elif os.fspath(path_prefix) != self.dataset_path:", "elif False:"),
        ("        if self._finder is None:\n", "        if True:\n"),
        ('        state["_finder"] = None\n', ""),
        ("drop_last = not self._keep_partial", "drop_last = True"),
        ("if len(token_ids) != wanted:", "if False:"),
        ("if len(token_ids) > wanted:", "if False:"),
        ("starts = self._starts_of_pieces(idx)", "starts = after_eod"),
        ("elif config.reset_position_ids:", "elif False:"),
        ("mask_starts = after_eod if config.reset_attention_mask else [0]", "mask_starts = [0]"),
        ("            self._warn_of_real_pads()\n", "            pass\n"),
        ("end = None if length is None else offset + length", "end = None"),
    ],
    "6": [
        ("used = np.flatnonzero(weights)", "used = np.arange(len(weights))"),
        ("d = used[dataset_index[part]]", "d = dataset_index[part]"),
        ("dataset_sample_index[part] += taken_before[d]", "pass"),
        ("taken_before = taken.copy()", "taken_before = taken"),
        ("taken += np.bincount(d", "taken = np.bincount(d"),
        ("elif weights is None and size is None:", "elif True:"),
        ("len(self.phases) == 1 and all(weights)", "len(self.phases) == 1"),
        ("len(self.phases) == 1 and all(weights)", "all(weights)"),
        ('identifiers["phases"] = self.phases', "pass"),
        ("        return self.phases is not None\n", "        return True\n"),
        ("or not dataset.is_stable:", "or False:"),
        ("np.argmax(weights * max(i, 1) - taken)", "np.argmax(weights * (i + 1) - taken)"),
        ("lag = weights * max(i, 1) - taken", "lag = weights * i - taken"),
        (
            "weights = sizes / np.float64(max(size, 1))",
            "weights = (sizes / np.float64(max(size, 1))).astype(np.float32)",
        ),
        ("if not np.array_equal(counts, sizes[:num_datasets]):", "if False:"),
        ("if not 0 <= size <= room:", "if not 0 <= size:"),
        ("if np.may_share_memory(dataset_index, dataset_sample_index):", "if False:"),
        ("if not 0 < num_datasets < 2**15 - 1", "if not 0 < num_datasets"),
        ("if not 0 <= weight < math.inf:", "if False:"),
        ("any(weight != int(weight) for weight in weights)", "False"),
        ("and (size < 0 or size % 1):", "and size < 0:"),
        ("and (size < 0 or size % 1):", "and size % 1:"),
        ("    if len(phases) == 0:\n", "    if False:\n"),
        ("self.weights = normalize(weights)", "self.weights = weights"),
        ('identifiers["size"] = self.size', 'identifiers["size"] = None'),
        ('identifiers["weights"] = self.weights', 'identifiers["weights"] = None'),
        ("if taken[d] > len(dataset):", "if taken[d] > len(dataset) + 1:"),
        ("if taken[d] > len(dataset):", "if taken[d] >= len(dataset):"),
        ("return 0, None", "return 0, 0"),
        ("sum(self.weights) if self.size is None else self.size", "sum(self.weights)"),
        ("if prefix not in prefixes:", "if False:"),
        ("for k in samples if k < len(places)]", "for k in samples if k < len(places) - 1]"),
        ("        return sorted(found)\n", "        return found\n"),
        ("        if d not in self._places:\n", "        if True:\n"),
        ('self.__dict__ | {"_places": {}}', "self.__dict__.copy()"),
        ("return self.datasets[d].trace(k)", "return self.datasets[0].trace(k)"),
        ("        self._check_counts(dataset_index)\n", ""),
        ("            self._check_counts(self.dataset_index)\n", "            pass\n"),
        ('identifiers["split"] = self.split.name', 'identifiers["split"] = None'),
        ("batch[row] = {", "batch[0] = {"),
    ],
    "7": [
        ("if len(self.sizes) != len(Split):", "if False:"),
        ("if self.sizes[Split.valid.value] is not None:", "if False:"),
        ("and 0 <= size < math.inf", ""),
        ("if size is not None and not is_number:", "if False:"),
        ("if size is None and weights is not None and not has_phases:", "if False:"),
        ("return config.blend if is_built and not", "return config.blend if not"),
        ("if len(prefixes) == 1 or self", "if self"),
        ("[math.ceil(samples * weights[d]) for", "[round(samples * weights[d]) for"),
        ("self._add_surplus(sum(targets))", "self._add_surplus(targets[0])"),
        ("self._add_surplus(math.ceil(size * weights[d]))", "self._add_surplus(size * weights[d])"),
        ("pool.shutdown(cancel_futures=True)", "pool.shutdown()"),
        ("FIRST_EXCEPTION", "ALL_COMPLETED"),
        ("            parts = self._leave_out_empty(split, parts)\n", ""),
        ("math.ceil(target * (1", "round(target * (1"),
        ("1 + self.config.mid_level_dataset_surplus", "1"),
        ("            weights = _normalize_used(weights)\n", ""),
        (
            "elif num_corpora > 1:\n                size = None",
            "elif False:\n                size = None",
        ),
        ("if size is not None and size > total:", "if False:"),
        ("if phases is None:  # a phase has", "if True:  # a phase has"),
        ("split is Split.train and config.blend_phases is not None", "False"),
        (
            "self._blend_exactly(parts, None, None, phases)",
            "self._blend_exactly(parts, [1] * len(parts), 1)",
        ),
        ("if n >= 2**31:", "if False:"),
        ("size = sum(math.ceil(size * weight) for weight in weights)", "pass"),
        (
            "split, parts)\n            weights = [len(part) for part in parts]",
            "split, parts)\n            weights = [1 for part in parts]",
        ),
        ("if size is not None and size > sum(weights):", "if False:"),
        ("needed[part], part.index_split", "part.num_samples, part.index_split"),
        ("return split is Split.valid and", "return True and"),
        ("matrix[split.value] = (0.0, 1.0)", "matrix[split.value] = (0.0, 0.9)"),
        ("return datasets if is_wanted else [None] * len(Split)", "return datasets"),
        ("                if size == 0:\n", "                if False:\n"),
        ("prefixes, weights = _drop_zero_weights(prefixes, weights, prefixes)", "pass"),
        ("if self._is_kept_apart(split) and len(prefixes) > 1:", "if self._is_kept_apart(split):"),
    ],
    "8": [
        ("is_in_order = False", "is_in_order = True"),
        ("found.pop(key, None)", "pass"),
        ("if left > 0:", "if left >= 0:"),
        ("past.append((min(samples, left), weights))", "past.append((samples, weights))"),
        ("        left -= samples\n", "        pass\n"),
        ('flat[f"samples of phase {number}", ""] = samples', "pass"),
        ("if not any(weights[d] for _, weights in phases):", "if False:"),
        ('flat[f"weight in phase {number}", d] = weight', "pass"),
        ('found["stable_order"] = True', "pass"),
        ('found["phases"] = _describe_phases(dataset.phases)', "pass"),
        ("if size < 1 or size % 1:", "if size < 0 or size % 1:"),
        ("if size < 1 or size % 1:", "if size < 1:"),
        ('        keys = [("sampler", "")]', "        pass"),
        ("{(str(entry), str(d)): value", "{(entry, d): value"),
        ("    if train_samples < 0 or eval_iters < 0:\n", "    if train_samples < 0:\n"),
        ("    if train_samples < 0 or eval_iters < 0:\n", "    if eval_iters < 0:\n"),
        ('("split", "sequence_length", "random_seed", "stable_order")', '("split",)'),
        ("if not 0 <= data_parallel_rank < data_parallel_size:", "if False:"),
        ("if rest and not self.drop_last:", "if not self.drop_last:"),
        ("self.consumed_samples = 0  #", "pass  #"),
        ("begin = first + _ceil_div(rank * count, ranks)", "begin = first + rank * count // ranks"),
        (
            "            first += self.samples_per_round\n",
            "            first += self.micro_batch_size\n",
        ),
        ("yield [*range(begin, end), *padding]", "yield [*range(begin, end)]"),
        ("manual_seed(self.seed + epoch)", "manual_seed(epoch)"),
        ("manual_seed(self.seed + epoch)", "manual_seed(self.seed)"),
        ("order[done // ranks :]", "order[done:]"),
        ("order = order[done : self.active_total_samples]", "order = order[done:]"),
        (
            "order[self.data_parallel_rank :: self.data_parallel_size]",
            "order[:: self.data_parallel_size]",
        ),
        (
            "unit = self.samples_per_round if self.data_sharding else self.micro_batch_size",
            "unit = self.samples_per_round",
        ),
        ("or consumed_samples % self.samples_per_round:", "or False:"),
        ("if not self.active_total_samples:", "if False:"),
        ('key["data_parallel_size"] = self.data_parallel_size', "pass"),
        ('found["random_seed"] = dataset.config.random_seed', "pass"),
        ('flat["weight", d] = weight', "pass"),
        ('("documents", "idx_mtime_ns")', '("documents",)'),
        ('found["contents"] = _md5(json.dumps([digest, identity]))', "pass"),
        ('if found == wanted or entry == "name":', "if found == wanted:"),
        ('data["corpora"] = sorted(corpora)', 'data["corpora"] = []'),
        ('if entry == "contents":  # a digest', "if False:  # a digest"),
        ("    if type(value) is int:\n", "    if False:\n"),
        ("if differences and strict:", "if False:"),
        ("while empty_passes < 2:", "while empty_passes < 1:"),
        ("        if self._is_kept:\n", "        if True:\n"),
        ("        if not self._is_kept:\n", "        if False:\n"),
        ("            self.saved_microbatches.append(item)\n", "            pass\n"),
        ("left = self.saved_microbatches[self.replay_pos :]", "left = []"),
        (
            "        self._is_kept = True\n\n\ndef get_train",
            "        self._is_kept = len(self.saved_microbatches) > 0\n\n\ndef get_train",
        ),
        ('"saved_microbatches": list(self.saved', '"saved_microbatches": (self.saved'),
        ("    evaluations = 1\n", "    evaluations = 0\n"),
        ("    if not skip_train:\n", "    if True:\n"),
        ("first = self.data_parallel_rank * self.micro", "first = self.micro"),
        ("if size % self.unit:", "if False:"),
        ("if global_batch_size not in self.sizes:", "if False:"),
        ("None if full_validation else evaluations", "evaluations"),
        ('"seed": self.seed,', ""),
        ('"data_sharding": self.data_sharding,', ""),
        ('            "epoch": epoch,\n', ""),
        ('"done": done,', ""),
        ('"shuffled": self._num_shuffled(),', ""),
        ('found["size"] = dataset.size', "pass"),
        ('found["contents"] = _md5(json.dumps([digest, identity]))', "pass"),
        ('found["split"] = dataset.index_split.name', "pass"),
        ('found["requested"] = dataset.num_samples\n        found["seq', 'found["seq'),
        ('found["sequence_length"] = dataset.config.sequence_length', "pass"),
        ("    sampler.check_start(consumed_samples)\n    here", "    here"),
        ('    data["version"] = state["version"]\n', ""),
        ("if not 0 <= consumed_samples < 2**63 or", "if not 0 <= consumed_samples or"),
        (
            "total_samples, consumed_samples, 1,",
            "total_samples, consumed_samples, micro_batch_size,",
        ),
    ],
    "9": [
        ('if not set(axes) <= {"tp", "cp", "dp", "pp"}:', "if False:"),
        ("rest, tp = divmod(rank, tensor)", "rest, tp = divmod(rank, context)"),
        ("pp, dp = divmod(rest, data)", "dp, pp = divmod(rest, pipeline)"),
        ("world % model != 0:", "False:"),
        ('return self.rank("pp") == 0', 'return self.rank("pp") == 1'),
        ('self.size("pp") - 1', 'self.size("pp") - 2'),
        ("if first or (last and mtp):", "if first:"),
        ("    if last:\n", "    if last or first:\n"),
        ("if (first or last) and create_attention_mask:", "if create_attention_mask:"),
        ("if makes_mask:\n        del", "if False:\n        del"),
        ("if found != shape:", "if False:"),
        ("starts_of_rows = cu_seqlens.tolist()", "pass"),
        ("status = _FAILED\n            error = caught", "raise"),
        ("status = _PACKED\n        tensors", "pass\n        tensors"),
        ("        start += size\n    return views", "    return views"),
        ("if not 0 <= cp_rank < cp_size:", "if False:"),
        ("part = dict(batch)", "part = batch"),
        ("if cu_seqlens is None or use_per_sequence_balancing:", "if cu_seqlens is None:"),
        ('dim = 2 if key == "attention_mask" else 1', "dim = 1"),
        ('if key not in ("dataset_id", *_PACKING_KEYS) and', "if"),
        ("if length % (2 * cp_size) != 0:", "if False:"),
        ("if (end - begin) % (2 * cp_size) != 0:", "if False:"),
        ("bounds = sorted({0, *starts, length})", "bounds = [0, length]"),
        ("back = end - (cp_rank + 1) * size", "back = end - cp_rank * size - size // 2"),
        ("front = begin + cp_rank * size", "front = begin"),
        ("if min(tensor, context, data, pipeline) < 1:", "if False:"),
        ("if min(tensor, context, pipeline) < 1 or", "if"),
        ("if kind not in self._ranks:", "if True:"),
        ('torch.distributed.get_backend() != "gloo":', "False:"),
        ("if data_iterator is None:", "if False:"),
        ("if found == shape and batch", "if False and batch"),
    ],
    "10": [
        ("if bucket_size < 1:", "if False:"),
        ("for param in reversed(self._names):", "for param in self._names:"),
        ("            if not param.requires_grad:\n", "            if False:\n"),
        (">= bucket_size:", "> bucket_size:"),
        (
            "self.grad_shards.append(data.chunk(self.size)[_rank(self.group)])",
            "self.grad_shards.append(data.chunk(self.size)[0])",
        ),
        ("        self._in_sync = False\n", "        pass\n"),
        ("if number < self._num_sent:", "if False:"),
        ("param.main_grad.copy_(param.grad)", "pass"),
        ("if self._buckets[self._num_sent].waiting:", "if False:"),
        ("bucket.data.mul_(1 / self.size)", "pass"),
        ("if self.check_for_nan_in_grad and param.main_grad.isnan().any():", "if False:"),
        ("                bucket.handle.wait()\n", ""),
        (
            "            param.main_grad.zero_()\n            param.grad = param.main_grad\n\n"
            "    def scale",
            "            param.grad = param.main_grad\n\n    def scale",
        ),
        ("part.scale_gradients(part.size / total)", "part.scale_gradients(1 / total)"),
        ("if total != 0:", "if True:"),
        ("loss = loss / num_microbatches", "pass"),
        ("is_last = number == num_microbatches - 1", "is_last = number == 0"),
        ("if len(parts) != 1:", "if False:"),
        ("            if not forward_only:\n", "            if True:\n"),
        ('group = groups.group("dp-cp")', "pass"),
        ("self.wrapper = weakref.ref(wrapper)", "self.wrapper = lambda: wrapper"),
        ("            self._in_sync = before\n", "            pass\n"),
        ("        self._must_send = False\n", "        pass\n"),
        (
            "operation = torch.distributed.ReduceOp.AVG",
            "operation = torch.distributed.ReduceOp.SUM",
        ),
        (
            "if param.grad is None:\n                param.main_grad",
            "if False:\n                param.main_grad",
        ),
        (
            "for param in self._names:\n            torch",
            "for param in self._bucket_of:\n            torch",
        ),
        ("if num_microbatches < 1:", "if False:"),
        ("token_counts.append(tokens)", "pass"),
        ("elif num_tokens is not None and num_tokens != 0:", "elif num_tokens is not None:"),
    ],
    "11": [
        ("if folder and not os.path.isdir(folder):", "if False:"),
        ("{secrets.token_hex(8)}", "0000000000000000"),
        ("shutil.copymode(self.path, self.temporary)", "pass"),
        ("os.fsync(self.file.fileno())", "pass"),
        (
            "        os.replace(self.temporary, self.path)\n",
            "        shutil.copyfile(self.temporary, self.path)\n",
        ),
        ("            if kind is None:\n", "            if True:\n"),
        ("            self.discard()\n", "            pass\n"),
        ("pathlib.Path(index.path).unlink(missing_ok=True)", "pass"),
        ("    tokens.commit()\n    index.commit()\n", "    index.commit()\n    tokens.commit()\n"),
        ("if os.path.getsize(path) == 0:", "if False:"),
        ("    tokens.sync()\n    index.sync()\n", ""),
        ("        RemoteFile(index.path).remove()\n", "        pass\n"),
        ("            os.unlink(self.temporary)\n        else", "            pass\n        else"),
        ("            file_exists(self.path)\n", ""),
        ("with contextlib.suppress(OSError):\n            shutil", "if True:\n            shutil"),
        ("        self.sync()\n", "        self.file.flush()\n"),
    ],
    "12": [
        ("json.dumps(identifiers, indent=4,", "json.dumps(identifiers, indent=2,"),
        ("self.made_from |= made_from", "pass"),
        ("if trust and self.exists():", "if trust:"),
        ("if trust and self.exists():", "if False:"),
        ("if self._load():", "if False:"),
        ("        if defer:\n", "        if False:\n"),
        ("if manifest.exists():  # if not", "if True:  # if not"),
        ('if manifest.read_text("utf-8") == text:', "if True:"),
        ("if description != self.description:", "if False:"),
        ('if manifest["made_from"].get(key) != value:', "if False:"),
        ("if now != before:", "if False:"),
        ("crc32 = zlib.crc32(piece[:size], crc32)", "crc32 = 0"),
        ("if _rank() == 0:", "if False:"),
        ("allow_pickle=False", "allow_pickle=True"),
        ("except _FAULTS as error:", "except OSError as error:"),
        ("self._arrays = self._save(pending, leftovers)", "self._save(pending, leftovers)"),
        (
            "            except OSError as error:\n                warnings",
            "            except KeyError as error:\n                warnings",
        ),
        ("        leftovers.callback(new_file.discard)\n", ""),
        ("[*new_files, description, manifest]:", "[manifest, description, *new_files]:"),
        ("crc32 = zlib.crc32(piece, crc32)\n        new_file", "pass\n        new_file"),
        ('("manifest.json", "description.txt"):', '("description.txt",):'),
        ('"crc32": crc32}\n        return _Written', '"crc32": 0}\n        return _Written'),
        ("self._arrays = arrays | {name: values}", "self._arrays = {name: values}"),
        (
            "self._arrays = arrays | {name: values}\n        self._is_saved = False",
            "self._arrays = arrays | {name: values}",
        ),
        ("            arrays = self._map_arrays()\n", "            pass\n"),
        ('            state["_arrays"] = None\n', "            pass\n"),
        (
            "        if self.folder is None:\n            self._arrays =",
            "        if False:\n            self._arrays =",
        ),
        ("self.folder = folder if folder else None", "self.folder = folder"),
        (
            "        if self._is_saved:\n            self._arrays",
            "        if True:\n            self._arrays",
        ),
        ("os.makedirs(self.folder, exist_ok=True)", "pass"),
    ],
    "13": [
        ("if self.bin_chunk_nbytes < 0:", "if False:"),
        ("if is_remote(self.folder):", "if False:"),
        ("block not in blocks:", "True:"),
        ("min(block + self.block_bytes, self._size)", "block + self.block_bytes"),
        ("[-self._KEPT_BLOCKS :]", "[-1:]"),
        ("[-self._KEPT_BLOCKS :]", ""),
        ("[begin - first : end - first]", "[: end - begin]"),
        ("        if not os.path.exists(copied):\n", "        if True:\n"),
        ("    if os.path.exists(copied):\n        return copied\n", ""),
        ("        fcntl.flock(lock, fcntl.LOCK_EX)", "        pass"),
        ("{_md5(path)}-{stamp['changed']}.idx", "{stamp['changed']}.idx"),
        ("{_md5(path)}-{stamp['changed']}.idx", "{_md5(path)}.idx"),
        ("    if remote.stamp() != stamp:\n", "    if False:\n"),
        ("            if begin == end:\n", "            if False:\n"),
        ('on_error="return"', 'on_error="raise"'),
        ("elif len(content) > end - begin:", "elif False:"),
        ("elif len(content) != end - begin:", "elif False:"),
        ("if span not in contents]", "]"),
        ("        file_system.invalidate_cache(path)\n", ""),
        ("or _is_permanent(fault):", "or False:"),
        ("            time.sleep(self._PAUSES[attempt])\n", ""),
        ("num_tries = len(self._PAUSES) + 1", "num_tries = len(self._PAUSES)"),
        ("raise self._describe(fault) from None", "raise self._describe(fault) from error"),
        ("text = hide_credentials(f", "text = (f"),
        ("        url = hide_credentials(self.url)\n", "        url = self.url\n"),
        ("in (401, 403):", "in ():"),
        ('if is_of_http and getattr(cause, "status", None) != 404:', "if False:"),
        ("return status not in (408, 429)", "return True"),
        ('    if "Credentials" in type(error).__name__:\n        return True\n', ""),
        ("in _PERMANENT_ERRNOS:", "in ():"),
        (
            "with contextlib.suppress(FileNotFoundError):\n            self._try",
            "if True:\n            self._try",
        ),
        ("if isinstance(error, ImportError):", "if False:"),
        ("self.tokens[start : start + count]", "self.tokens[start : start + count].copy()"),
        ("begin = start * self.dtype.itemsize\n        content", "begin = start\n        content"),
        (
            "begin = start * self.dtype.itemsize\n            ranges",
            "begin = start\n            ranges",
        ),
        (
            "        if len(content) < size:\n            raise",
            "        if False:\n            raise",
        ),
        ("begin + len(content))", "begin)"),
        ("    while len(content) < size:\n", "    for _ in range(1):\n"),
        ("for start, count in spans]", "for start, count in sorted(spans)]"),
        ("range(0, len(ranges), self._KEPT_BLOCKS)", "range(0, len(ranges), 99)"),
        ('("url", "time", "accessTime")', '("url",)'),
        ('if self.url.lower().startswith("file://"):', "if False:"),
        ("        if isinstance(error, FileNotFoundError):\n", "        if False:\n"),
        (" {type(error.__cause__).__name__}", ""),
        ('    if "SSL" in names:', "    if False:"),
        ('return "SSLCertVerificationError" in names', "return False"),
        ("|[^/\\s:]+:(?!\\d+/)[^\\s@'\\\"]*)@", ")@"),
        ("(?!\\d+/)", ""),
    ],
    "14": [
        ("            if self._num_loads != num_loads:\n", "            if False:\n"),
        ("        self._num_loads += 1\n", ""),
        ('and arguments.keys() <= {"pin_memory"}', ""),
        ("self.num_threads = num_workers", "self.num_threads = 0"),
        ("            sampler.consumed_samples = self.consumed_samples\n", ""),
        ("            limit = math.inf  #", "            #"),
        ("consumed += sampler.samples_per_round", "consumed += sampler.micro_batch_size"),
        (
            "            self.consumed_samples = min(consumed, limit)\n",
            "            self.consumed_samples = consumed\n",
        ),
        ("self.batch_sampler.consumed_samples = consumed", "pass"),
        ("        self.consumed_samples = consumed\n        self.batch", "        self.batch"),
        ("if len(pending) > limit:", "if len(pending) > 10**9:"),
        ("pending.popleft().result()\n        while", "pending.pop().result()\n        while"),
        ('if dataset is None or dataloader_type == "external":', "if dataset is None:"),
        ("    if full_validation:\n", "    if False:\n"),
        ("(**layout, drop_last=drop_last)", "(**layout)"),
        ("data_sharding=data_sharding, seed=seed", "data_sharding=data_sharding"),
        ("data_sharding=data_sharding, seed=seed", "data_sharding=True, seed=seed"),
        ("        if num_workers < 0:\n", "        if False:\n"),
        ("        yield failed\n", "        raise\n"),
        ('if sampler.kind == "cyclic":', "if False:"),
        ("            num_workers = 0  # torch", "            pass  # torch"),
    ],
    "15": [
        ("or torch.distributed.get_world_size(group) == 1:", "or False:"),
        ("        mine = _rank(group)\n", "        mine = 0\n"),
        (
            "first_failed, torch.distributed.ReduceOp.MIN",
            "first_failed, torch.distributed.ReduceOp.MAX",
        ),
        ("sentence = str(error.args[0])", "pass"),
        ("if _SHARED_ERRORS.get(name) is not type(error):", "if name not in _SHARED_ERRORS:"),
        ('if not hasattr(error, "names_its_rank"):', "if True:"),
        ("sentence[:_MESSAGE_CHARACTERS]", "sentence"),
        ("if least != most:", "if False:"),
        ("    shared.names_its_rank = True\n", ""),
        ("    raise shared from error\n", "    raise shared\n"),
        (
            "shared = _SHARED_ERRORS[name](sentence)",
            "raise RuntimeError(sentence) from error",
        ),
    ],
    "16": [
        (
            "    if not isinstance(values, (list, np.ndarray)):\n        values",
            "    if False:\n        values",
        ),
        ("    _has_warned_of_python = True\n", "    pass\n"),
        ("num_entries <= _MANY_ENTRIES or", ""),
        (
            '    if os.environ.get("MEGATRON_MIN_C") == "0":\n        return',
            "    if True:\n        return",
        ),
        (
            'if os.environ.get("MEGATRON_MIN_C") == "1":\n            sentence',
            "if False:\n            sentence",
        ),
        (
            "    except (IndexError, ValueError):\n        return",
            "    except KeyError:\n        return",
        ),
        ("(before[part + 1] - x) // S + 1)", "(before[part + 1] - x) // S)"),
        ("    if tokens_needed < num_samples * S and not x:\n", "    if False:\n"),
        ("items.dtype in (np.int32, np.uint32, np.int64)", "True"),
        ("    random_state.set_state(state)\n", ""),
        ('    "__getitem__",\n', ""),
        ('    "pieces",\n', ""),
        ('    "_query_document_sample_shuffle_indices",\n', ""),
        ("return corpus.is_mapped", "return True"),
        ("and dataset.config is blend.config", ""),
        ("return pads >= 0", "return True"),
        ("        dataset._warn_of_real_pads()\n", "        pass\n"),
        ('columns["loss_mask"][row] = 0', "pass"),
        ("torch.from_numpy(values[row, ...])", "torch.from_numpy(values[0, ...])"),
        ('columns["dataset_id"][rows] = d', 'columns["dataset_id"][rows] = 0'),
        ('if os.environ.get("MEGATRON_MIN_C") != "0":', "if True:"),
        ("if not isinstance(error, ModuleNotFoundError):", "if True:"),
        ("if not isinstance(error, ModuleNotFoundError):", "if False:"),
        ("return 1 if cores is None else cores", "return cores"),
        ("dataset_index.flags.carray and dataset_sample_index.flags.carray", "True"),
        ("if type(corpus) is not IndexedDataset or corpus.multimodal:", "if False:"),
        ("if type(dataset).batch is not BlendedDataset.batch or not", "if not"),
        (" and type(dataset).batch is GPTDataset.batch", ""),
        ("        and cls.__getitems__ is BlendedDataset.__getitems__\n", ""),
        ("                config.eod_mask_loss,\n", "                False,\n"),
        ("                config.reset_attention_mask,\n", "                False,\n"),
        ("                config.reset_position_ids,\n", "                False,\n"),
    ],
    "17": [
        ("        if error.name != package:", "        if False:"),
        ("self.eod = int(vocab_size)", "self.eod = int(vocab_size) - 1"),
        ("if not str(vocab_size).isdecimal():", "if False:"),
        ("self.vocab_size = self.eod + 1", "self.vocab_size = self.eod"),
        ('["<|endoftext|>", "</s>"]', '["</s>", "<|endoftext|>"]'),
        ("            names = [eod_token]\n", "            pass\n"),
        ("skip_special_tokens=False", "skip_special_tokens=True"),
        ("encode(text, add_special_tokens=self._add_special_tokens)", "encode(text)"),
        ("            texts, add_special_tokens=self._add_special_tokens\n", "            texts\n"),
        ('self.unique_identifiers["add_special_tokens"] = True', "pass"),
        ("eod_token, add_special_tokens)", "eod_token)"),
        ('if add_special_tokens and not name.endswith(".json"):', "if False:"),
        ("        sys.path.remove(folder)\n", "        pass\n"),
        ("if not callable(found):", "if False:"),
        ("except Exception as error:  # the package", "except KeyError as error:  # the package"),
        ('if ":" not in name:', "if False:"),
    ],
    "18": [
        ('if on_error not in ("stop", "skip"):', "if False:"),
        ("    if workers < 1:\n", "    if False:\n"),
        ('if path == "-" or os.path.exists(path):', 'if path == "-":'),
        (
            "sorted(glob.glob(path, recursive=True))",
            "glob.glob(path, recursive=True)[::-1]",
        ),
        ("origin)\n        first_line += len(lines)\n", "origin)\n        first_line += 1\n"),
        ("except Exception as error:  # each format", "except KeyError as error:  # each format"),
        ("            self.eod = self._as_tokens([eod])\n", "            pass\n"),
        ("            if eod is None:\n", "            if False:\n"),
        ("if not self.skip_errors:", "if True:"),
        ("                faults.append(fault)\n", "                pass\n"),
        ("not _is_text(row.get(key))", "False"),
        ("return all(isinstance(sentence, str) for sentence in value)", "return True"),
        ("if len(batch) != len(texts):", "if False:"),
        ("for tokens in sequences if len(tokens) > 0]", "for tokens in sequences]"),
        ("                lengths[-1] += len(self.eod)\n", ""),
        ("            ends.append(len(lengths))\n", "            ends.append(len(ends) + 1)\n"),
        ("        self.num_skipped += encoded.num_skipped\n", ""),
        ("self.verbose and now - self.printed >= _PROGRESS_SECONDS:", "False:"),
        ("self.verbose and now - self.printed >= _PROGRESS_SECONDS:", "self.verbose:"),
        ("lines = [line for line in block.lines if not line.isspace()]", "lines = block.lines"),
        ("            if line.isspace():\n", "            if False:\n"),
        ("num_blank=len(block.lines) - len(lines),", "num_blank=0,"),
        ("if os.path.isdir(path):", "if False:"),
        ("os.makedirs(folder, exist_ok=True)", "pass"),
        ("except (FileExistsError, NotADirectoryError):", "except KeyError:"),
        ("if number == 0 and path in self.whole_files:", "if number == 0:"),
        ("if number == 0 and path in self.whole_files:", "if False:"),
        ("if len(empty) == len(self.documents_of_file):", "if False:"),
        ("        if seconds < 1:\n", "        if False:\n"),
        ("        if documents >= 1:\n", "        if True:\n"),
        ("bytes_left = max(self.total_bytes - self.num_bytes, 0)", "bytes_left = self.total_bytes"),
        ('        return f"1 {noun}"\n', '        return f"1 {noun}s"\n'),
        ('return f"{number:,} {noun}s"', 'return f"{number} {noun}s"'),
        ("    progress.finish()\n", "    pass\n"),
        ("lines, file.tell() - position)", "lines, 0)"),
        # shards
        ("if not 0 <= shard[0] < shard[1]:", "if False:"),
        ("first = sum(sizes) * index // count", "first = sum(sizes) // count * index"),
        ("        start += size\n", "        start = size\n"),
        ("or (size == 0 and index == 0)", ""),
        ("    if None in sizes:\n", "    if False:\n"),
        ("file.seek(position - 1)", "file.seek(position)"),
        ("position += len(rest_of_line) - 1", "position += len(rest_of_line)"),
        ("min(_BLOCK_BYTES, part.end - position)", "_BLOCK_BYTES"),
        ("    while num_bytes > 0:\n", "    while num_bytes >= 0:\n"),
        ("elif part.begin == 0:", "else:"),
        ("if part.begin <= part.size * group", "if 0 <= part.size * group"),
        ("// table.num_row_groups < part.end:", "// table.num_row_groups <= part.end:"),
        ("if not _is_made(record_path, description, prefixes):", "if True:"),
        (
            '"inputs": [[hide_credentials(path), _stamp_in_words(path)] for path in paths],',
            '"inputs": paths,',
        ),
        ('        "options": encoder.describe(),\n', ""),
        ('json.dumps(description | {"pairs": pairs}, ', "json.dumps(description, "),
        ("except (OSError, ValueError):  # the record", "except ValueError:  # the record"),
        ('"tokenizer": self.tokenizer.unique_identifiers,', ""),
        ('"eod": self.eod.tolist(),', ""),
        ("if name is not None and len(wanted) == 0:", "if name is not None:"),
        ("            if prefix != shard:\n", "            if False:\n"),
        ("    if len(wanted) > 0:\n        raise", "    if False:\n        raise"),
        # inputs
        ("for match in sorted(objects)]", "for match in objects][::-1]"),
        ('if info["type"] != "directory"]', "]"),
        ("                if self._frame is not None:\n", "                if False:\n"),
        (
            "        self._compressed = self._frame.unused_data\n",
            '        self._compressed = b""\n',
        ),
        ("        self._text = self._text[count:]\n", '        self._text = memoryview(b"")\n'),
        ("if key not in table.schema_arrow.names:", "if False:"),
        ("        first_row += num_rows\n", ""),
        ("default=_no_text", "default=str"),
        ('unit="row"', 'unit="line"'),
        ('level = "sentence" if split_sentences', 'level = "document" if split_sentences'),
        ("            counts.append(len(parts))\n", "            counts.append(1)\n"),
        ("    except LookupError:\n", "    except KeyError:\n"),
        ("[match for match in found if not os.path.isdir(match)]", "found"),
        ("if not folder or is_remote(path):", "if not folder:"),
        ('"SLURM_NTASKS"))', '"SLURM_NNODES"))'),
        ("with _open_input(record_path) as file:", 'with open(record_path, "rb") as file:'),
        ("self._position = starts[whence] + offset", "self._position = offset"),
        ("end = min(begin + len(buffer), self._size)", "end = begin + len(buffer)"),
        ("io.SEEK_END: self._size", "io.SEEK_END: 0"),
        ('path = path.partition("?")[0]', "pass"),
        ("    return path.lower()\n", "    return path\n"),
        ("if str(error).startswith(name):", "if False:"),
        ("if str(error).startswith(name):", "if isinstance(error, OSError):"),
        ('if _format_name(path).endswith(".zip"):', "if False:"),
        ("except concurrent.futures.BrokenExecutor:", "except KeyError:"),
        ("workers <= _MOST_THREADS and", ""),
        ("encoder.suits_threads():", "False:"),
        ("type(self.tokenizer) is HuggingFaceTokenizer and", ""),
        (
            "    with concurrent.futures.ThreadPoolExecutor(workers) as pool:",
            "    pool = concurrent.futures.ThreadPoolExecutor(workers)\n    if True:",
        ),
        ("[hide_credentials(path) for path in empty[:3]]", "empty[:3]"),
    ],
    "19": [
        ('"create_attention_mask", "reset_attention_mask", "reset_position_ids"', '"mock",'),
        ("if self.num_samples and not len(self.indices)", "if False"),
        ("self._granularity = 2 * config", "self._granularity = config"),
        ("k % len(self.indices)", "k"),
        ('sample["loss_mask"].zero_()', "pass"),
        ("& ~is_filled[1:]", ""),
        ("is_learned &= labels != self._pad_token_id", "pass"),
        ("labels != _IGNORED", "labels != 5"),
        ("targets[1:].copy()", "targets[:-1].copy()"),
        ("positions_from(ends[:-1], S)", "positions_from([0], S)"),
        ("np.full(S + 1, S, np.int32)", "np.zeros(S + 1, np.int32)"),
        ("ends[: S + 1]", "ends"),
        ("np.diff(ends).max()", "np.diff(ends).min()"),
        ("if len(tokens) != len(targets)", "if False"),
        ("{self.dataset.describe_place(row)}: {error}", "{error}"),
        ('{"documents": _describe_documents(self.indices)} | self.dataset.identity()', "{}"),
        ('message["role"] == "system" or', ""),
        ("not isinstance(messages, list) or", ""),
        ("not isinstance(message, dict) or", ""),
        ("*tokenizer.tokenize(content), tokenizer.eod]", "*tokenizer.tokenize(content)]"),
        ("[_IGNORED] * len(prompt)", "prompt"),
        ("_ceil_div(end, granularity) * granularity", "end"),
        ("if self._fill_token_id is None:", "if False:"),
        ('self._fill_token_id = _attribute(config.tokenizer, "eod")', "self._fill_token_id = 0"),
        ("if ends[-1] > S:", "if ends[-1] > S + 1:"),
        ("    ends[-1] = S\n", ""),
        ("is_filled[places] = False", "pass"),
        ("tokens[places] = conversation_tokens[:room]", "tokens[places] = 5"),
        ("if not line.isspace():", "if len(line) > 1:"),
        ("        starts.append(position)\n        return", "        return"),
        ("line_number += ", "line_number = "),
        ('{"size": size, "file_ends": _md5(first + last)}', '{"size": size}'),
        ("        os.stat(self.path)  #", "        #"),
        ('        del state["_file"]\n', ""),
        ('if "messages" not in names', "if False"),
        ("np.cumsum([0, *sizes])", "np.cumsum([*sizes, 0])"),
        ('side="right"', 'side="left"'),
        ("if kept_group != group", "if kept_group is None"),
    ],
    "20": [
        ("        if length > 0:\n            document", "        if True:\n            document"),
        ("            sample_offset += length\n", "            sample_offset += 1\n"),
        ('sequence, side="right")) - 1', 'sequence, side="left"))'),
        ("offset * token_bytes", "offset"),
        ("int(pair.sequence_pointers[sequence]) +", "int(pair.sequence_pointers[0]) +"),
        ("        self._places += np.arange(self._size)\n", ""),
        ("        self._places.sort()\n", ""),
        (
            "self._numbers[shuffle_index] = np.arange(len(shuffle_index),",
            "self._numbers[:] = np.arange(len(shuffle_index),",
        ),
        ("[i * self._size, (i + 1) * self._size]", "[i * self._size, i * self._size + 1]"),
        ("bisect.bisect_left(starts, d) - 1", "bisect.bisect_left(starts, d)"),
        (
            "bisect.bisect_right(starts, d), num_samples)",
            "bisect.bisect_left(starts, d), num_samples)",
        ),
        (
            "bisect.bisect_right(starts, d), num_samples)",
            "bisect.bisect_right(starts, d), num_samples + 1)",
        ),
        ("            if part_begin < part_end:\n", "            if True:\n"),
        ("begin = consumed_samples + step * global_batch_size", "begin = step * global_batch_size"),
        ('if dataloader_type == "single" and not 0 <= begin < len(dataset):', "if False:"),
        ("            full_validation=full_validation,\n", ""),
        ("            data_sharding=data_sharding,\n", ""),
        ("            drop_last=drop_last,\n", ""),
        ("            seed=seed,\n", ""),
        ("    if len(explained) == 0:\n", "    if False:\n"),
        ("    if rest or global_batch_size < 1:\n", "    if False:\n"),
        ("        batches = cyclic_iter(sampler)", "        batches = sampler"),
        ("bisect.bisect_left(ends, samples_drawn)", "bisect.bisect_right(ends, samples_drawn)"),
        ("samples_drawn <= epochs.samples_before_final_epoch", "False"),
        (
            "len(self) * self.config.sequence_length - self._extra)",
            "len(self) * self.config.sequence_length)",
        ),
        ("        if len(self) == 0:\n            return tokens\n", ""),
        ("row_bytes * (len(self) + 1)", "row_bytes * len(self)"),
        (
            "edges += [before, before + int(0.80 * samples_per_epoch) - 1]",
            "edges += [before, before + int(0.80 * samples_per_epoch)]",
        ),
        (
            "edges += [before, before + int(0.80 * samples_per_epoch) - 1]",
            "edges += [before + int(0.80 * samples_per_epoch) - 1]",
        ),
        ("edge + 1 - n if n <= edge else edge - n", "edge + 1 - n"),
        (
            "            if row.split == Split.train.name:\n                samples +=",
            "            if True:\n                samples +=",
        ),
        ("dataclasses.replace(config, path_to_cache=None)", "dataclasses.replace(config)"),
        ("    def _warn_if_no_eod(self):\n", "    def _warn_if_no_eod_(self):\n"),
        ("            if part is not first:\n", "            if False:\n"),
        (
            "np.multiply(weights_of_phase, share_of_phase)",
            "np.asarray(weights_of_phase)",
        ),
        ("tokens_drawn = drawn * part.config.sequence_length", "tokens_drawn = drawn"),
        ("fractions.Fraction(drawn, all_drawn)", "fractions.Fraction(drawn, len(part))"),
        (
            "fractions.Fraction(all_drawn, global_batch_size) / epochs",
            "fractions.Fraction(drawn, global_batch_size) / epochs",
        ),
        ("    if row.epochs > _MANY_EPOCHS:\n", "    if False:\n"),
        ("row.tokens_cut > _MUCH * row.tokens", "row.tokens_cut > row.tokens"),
        ("abs(change) <= max(1, _NEAR * part.num_samples)", "True"),
        ("    if is_wanted and difference > _MUCH * row.weight_asked:\n", "    if False:\n"),
        ("    if is_wanted and difference", "    if difference"),
        ("            if dataset.size > 0:\n", "            if False:\n"),
        (
            "        if not config.stable_order:\n            epochs",
            "        if False:\n            epochs",
        ),
        ("    if wants_eod and", "    if"),
        ("if _epochs_of_pile(part) > 1:", "if _epochs_of_pile(part) > 0:"),
        ("        if len(names) > 1:\n", "        if False:\n"),
        ("samples_of_train % global_batch_size:\n", "False:\n"),
        ("    notes = list(dict.fromkeys(notes))", "    notes = notes"),
        ("    if path.is_file():\n        files = [path]\n", "    if path.is_file():\n"),
        ("    if not stem.startswith(_md5", "    if False and not stem.startswith(_md5"),
        ("            if found != noted:\n", "            if False:\n"),
        ('shapes["sample_index"] == (num_samples + 1, 2)', "True"),
        ('shapes["dataset_sample_index"] == (num_samples,)', "True"),
    ],
    "21": [
        ('f"{__version__} ({_describe_kernels()})"', "__version__"),
        ("split_sentences=options.split_sentences,", ""),
        ("        shard=shard,\n", ""),
        ("        shard = shard_of_launcher()\n", "        shard = 0, 1\n"),
        ("    check_all_shards(options.input)\n", ""),
        ('f"{quoted}_*_of_{shard[1]:05}.idx"', 'f"{quoted}_*.idx"'),
        ("quoted = shlex.quote(whole)", "quoted = whole"),
        ("parsed.append((int(samples), values))", "parsed.append((int(samples), weights))"),
        ("if not samples.isdecimal() or None in values:", "if False:"),
        ("        return 130\n", "        return 1\n"),
        ("    sys.exit(143)\n", "    sys.exit(1)\n"),
        ("    signal.signal(signal.SIGTERM, previous)\n", "    pass\n"),
        ("    words = str(error).split()\n", '    words = str(error).split(" ")\n'),
        ("append_eod=options.append_eod,", ""),
        ("workers=options.workers,", ""),
        ("on_error=options.on_error,", ""),
        ("json_keys=options.json_keys,", ""),
        (
            "merge(options.input, options.output_prefix, options.multimodal)",
            "merge(options.input, options.output_prefix)",
        ),
        ("IndexedDataset(path, check=True)", "IndexedDataset(path, check=False)"),
        ('    if text == "none":\n', '    if text == "None":\n'),
        (
            "        if value is not None:\n            fields",
            "        if value:\n            fields",
        ),
        (
            "        return 1\n    except (Exception, KeyboardInterrupt)",
            "        return 0\n    except (Exception, KeyboardInterrupt)",
        ),
        ("        os.makedirs(options.keep, exist_ok=True)\n", ""),
        ("_parse_blend(options.valid_blend)", "_parse_blend(options.train_blend)"),
        (
            "            if name not in void and getattr(options, name, None) is None:\n",
            "            if name not in void:\n",
        ),
        ("        if name not in _RUN_OPTIONS:\n", "        if False:\n"),
        ("type(value) is not kind and (kind", "False and (kind"),
        ("    if of_file is None or any(blends):\n", "    if True:\n"),
        ("if isinstance(blend, list) and blend and isinstance(blend[0], list):", "if False:"),
        ("if isinstance(blend, list) and blend and", "if blend and"),
        ("if name not in void and", "if"),
        ('return ["blend_per_split", *per_split]', 'return ["blend_per_split"]'),
        ('return ["blend", "split", "blend_per_split"]', 'return ["blend", "split"]'),
        ('return ["blend", "split", "blend_per_split"]', 'return ["blend_per_split"]'),
        ("if value is not None and value < lowest:", "if False:"),
        ('if kind not in (None, "single", "cyclic"):', "if False:"),
        ("if not isinstance(phase, list) or len(phase) == 0:", "if False:"),
        ("            _check_saved(dataset)\n", ""),
        ("    if dataset._cache.folder is None:\n", "    if False:\n"),
        ("len(train) == 1 or all(", "all("),
        ("all(row.samples_requested is None for row in train)", "False"),
        ("if options.sizes is None and not config.stable_order:", "if False:"),
        ("cells += [_whole(count) for", "cells += [_short_count(count) for"),
        ("_step_of(k, options) if k < end else None", "_step_of(k, options)"),
        ("if len(samples) > 0 and samples[-1] >= end:", "if len(samples) > 0:"),
        ('if wanted is None or options.dataloader_type == "cyclic":', "if wanted is None:"),
        ("    if prefix is None:  # mock", "    if False:  # mock"),
        ('"mock data" if path is None else str(path)', "str(path)"),
        ("[len(tokens)] if tokens else []", "[len(tokens)]"),
        ('"--sequence", sequence, type=_whole_number', '"--sequence", sequence, type=int'),
        ("return prefixes, weights[0] if weights else None", "return prefixes, None"),
        (
            "isinstance(weights[0], list):\n            weights = weights[0]",
            "isinstance(weights[0], list):\n            pass",
        ),
        (
            '    if options.sizes is None:\n        raise ValueError("--sizes',
            '    if False:\n        raise ValueError("--sizes',
        ),
        (
            '_shorten(row.path_prefix), *cells])\n    titles = ["split", "corpus", "documents"',
            'str(row.path_prefix), *cells])\n    titles = ["split", "corpus", "documents"',
        ),
        ("math.ceil(share * 50)", "math.ceil(share * 60)"),
        ("bisect.bisect_right(begins, begin) - 1", "bisect.bisect_left(begins, begin)"),
        (
            "if eod is not None and eod in tokens[begin:end]:",
            "if eod is not None and eod in tokens[begin : begin + 1]:",
        ),
        ("get(span.sequence, span.offset, span.length)", "get(span.sequence, 0, span.length)"),
        ("(k - consumed) // options.global_batch_size", "k // options.global_batch_size"),
        ("    if k < consumed:\n", "    if False:\n"),
        (
            "(prefix, options.sequence):\n                tokens +=",
            "(prefix, options.sequence):\n                tokens =",
        ),
        ("default=None, shown=bool(defaults[name])", "default=True, shown=bool(defaults[name])"),
        (
            "        if value is not None:\n            layout",
            "        if value:\n            layout",
        ),
        ("quoted = repr(text)", "quoted = text"),
        ("if IndexedDataset.exists(path) or not os.path.exists(path):", "if True:"),
        ("lowest = (1 << bits) >> 1", "lowest = 1 << bits"),
        ("textwrap.fill(text, 100,", "textwrap.fill(text, 110,"),
        ("os.path.basename(sys.argv[0]) == os.path.basename(__file__)", "False"),
        ("path.endswith(extension) and not IndexedDataset.exists(path)", "False"),
        ('words = "required"', 'words = ""'),
        ('return "yes" if value else "no"', 'return "" if value else ""'),
        ("min(int(dataset.sequence_lengths[i]), 1000)", "0"),
        ("range(0, len(dataset), _ceil_div(len(dataset), 1000))", "range(1)"),
        ("lengths.min():,", "lengths[::2].min():,"),
        ("lengths.max():,", "lengths[::2].max():,"),
        ("if len(sample) < len(lengths):", "if False:"),
        ("if largest < tokenizer.vocab_size:", "if True:"),
        ("text is not None and _is_readable(text)", "text is not None"),
        ('    text = text.rstrip("\\ufffd")', '    text = text + ""'),
        ("        if largest >= vocab_size:\n", "        if largest > 10**9:\n"),
        ("    _warn_of_foreign_ids(config)\n", ""),
        ("dataset.samples_taken().tolist()", "map(len, dataset.datasets)"),
        ("    _make_folder_of(options.output_prefix)\n", ""),
        (
            "    if not text.isdecimal():\n        raise argparse",
            "    if False:\n        raise argparse",
        ),
    ],
    "C": [
        ("kind == 'u' || kind == 'i' ? (char)kind : '?'", "(char)kind"),
        ("wrong |= length < 0 || pointer != end;", "wrong |= pointer != end;"),
        ("wrong |= length < 0 || pointer != end;", "wrong |= length < 0;"),
        ("load(documents->buf, d, 8) < load", "load(documents->buf, d, 8) <= load"),
        ("wrong |= load(documents->buf, d, 8)", "wrong |= 0 & load(documents->buf, d, 8)"),
        ('"items of pointers", view[1].shape[0], view[0].shape[0],', '"", 0, 0,'),
        ("changed |= (int64_t)item ^", "changed = (int64_t)item ^"),
        ("(int64_t)item ^ (int64_t)(to_type)item", "item ^ (to_type)item"),
        ("return changed == 0;", "return 1;"),
        ("fits = PyLong_CheckExact(item);", "fits = 1;"),
        ("fits &= !too_large;", ""),
        ("fits = fits && convert(", "fits = convert("),
        ("(char)('0' + view->itemsize % 10)", "(char)('0' + 4)"),
        ("return a->len && b->len && a_at", "return 0 && a_at"),
        ("contiguous && view->ndim == array->ndim &&", "view->ndim == array->ndim &&"),
        ("contiguous && view->ndim == array->ndim &&", "contiguous &&"),
        ("!(array->use && view->readonly)", "1"),
        ("if (value >= low && value <= high)", "if (value >= low)"),
        ("store_rows(&s, k++, -s.first_document, 0, 1, wide);", "k++;"),
        ("if (id < 0 || id >= s.num_sizes)", "if (id >= s.num_sizes)"),
        ("if (id < 0 || id >= s.num_sizes)", "if (id < 0)"),
        (
            "        if (size < 0)\n            return (Walk)",
            "        if (size < -9)\n            return (Walk)",
        ),
        ("for (; end >= target; target", "for (; end > target; target"),
        ("(1 - 4 * DBL_EPSILON) / (double)s.sequence", "1.01 / (double)s.sequence"),
        ("return (Walk){k > last ? WALK_DONE : WALK_SHORT,", "return (Walk){WALK_DONE,"),
        ("y ^= (y << 15) & 0xefc60000u;", "y ^= (y << 15) & 0xefc70000u;"),
        ("(0u - (y & 1u)) & 0x9908b0dfu", "(0u - (y & 1u)) & 0x9908b0deu"),
        (
            "key[k] = mt_mix(key[k], key[0], key[MT_SHIFT - 1]);",
            "key[k] = mt_mix(key[k], key[1], key[MT_SHIFT - 1]);",
        ),
        ("want += partner[want] <= (uint32_t)i - want;", "want += partner[want] <= (uint32_t)i;"),
        ("        while (mask >> 1 >= i)\n", "        while (mask >> 1 > i)\n"),
        ("        g->pos += (int)count;\n", "        g->pos = MT_WORDS;\n"),
        ("    memcpy(key->buf, g.key, sizeof g.key);\n    Py_END", "    Py_END"),
        ("const int64_t sample = (int64_t)taken;", "const int64_t sample = (int64_t)taken + 1;"),
        ("            if (top < bar)\n                break;\n", ""),
        ("return d + !(mask & 1);", "return d + (mask == 2 || mask == 3);"),
        (
            "                    ahead = _mm_cmpgt_pd(lag[k + far], lag[k]);",
            "                    ahead = _mm_cmpge_pd(lag[k + far], lag[k]);",
        ),
        (
            "const Pack step = _mm_set1_pd((double)(i > 1 ? i : 1))",
            "const Pack step = _mm_set1_pd((double)i)",
        ),
        ("all->weight[d] >= 0.0 && all->weight[d] <= DBL_MAX", "all->weight[d] >= 0.0"),
        ("n += (mask >> k & 1) & (same < run);", "n += (mask >> k & 1) & (same < 1);"),
        ('CONVERT_FROM("i2", int16_t, type)', 'CONVERT_FROM("i2", uint16_t, type)'),
        ('CONVERT_FROM("u1", uint8_t, type)', 'CONVERT_FROM("u1", int8_t, type)'),
        ("if (edge[0] < 0 || edge[0] > edge[2] ||", "if (edge[0] > edge[2] ||"),
        ("edge[2] >= array[DOCUMENTS].shape[0] ||", "0 ||"),
        ("        edge[1] < 0 || edge[3] < 0 ||", "        edge[3] < 0 ||"),
        ("        if (id < 0 || id >= array[LENGTHS].shape[0])\n", "        if (id < 0)\n"),
        ("end = d == edge[2] ? edge[3] + b->extra : size;", "end = d == edge[2] ? edge[3] : size;"),
        ("begin = d == edge[0] ? edge[1] : 0;", "begin = 0;"),
        ("n > room + b->extra || end > size ||", "n > room + b->extra ||"),
        ("pointer % width ||", "0 ||"),
        ("pointer / width > items->shape[0] -", "0 && pointer / width > items->shape[0] -"),
        ("        if (n > room)   ", "        if (0)   "),
        ("longest = at - start > longest ? at - start : longest;", ""),
        ("const int64_t past = b->reset_mask ? start : 0;", "const int64_t past = 0;"),
        ("(size_t)(i + 1 - past)", "(size_t)(i - past)"),
        (
            "count_up(row[POSITIONS], start, i + 1, 0, 1);\n            start = i + 1;",
            "count_up(row[POSITIONS], start, i, 0, 1);\n            start = i;",
        ),
        ("(token == eod && b->mask_loss)", "0"),
        ("        if (token == pad)\n            PUT(int64_t, tokens, i, 0);\n", ""),
        ("pads += i + 1 < size;", "pads += 0;"),
        ("wanted < 0 ? wanted + samples : wanted;", "wanted;"),
        ("k < 0 || k >= samples)", "k < 0)"),
        ("if (j < 0 || j >= array[ROWS].shape[0] - 1 ||", "if (j < 0 ||"),
        (
            "        if (size <= length)\n"
            "            PUT(int64_t, row[LABELS], length - 1, b->pad);\n",
            "",
        ),
        ("if (b->look || size <= length)", "if (b->look)"),
        ("b.by_eod &= !b.by_document;", ""),
        ("b.code[0] == 'i' ||", "0 ||"),
        ("(b.pad >= 0 && b.pad >> 8 * b.array[ITEMS].itemsize == 0)", "0"),
        ("        PyBuffer_Release(&views[k]);  ", "        (void)0;  "),
        ("const char native = PY_LITTLE_ENDIAN ? '<' : '>';", "const char native = '>';"),
        ("n ? most - s->first_document : count", "count"),
        ("(n - 1) * s->sequence + s->extra + 1,", "0,"),
        ("target_of(s, s->first_row == 0) - 1)", "limit)"),
        ('"items of key", key->shape[0], MT_WORDS,', '"items of key", key->shape[0], 0,'),
        ('in_range("pos", g.pos, 0, MT_WORDS)', "1"),
        ("view[2].shape[0], count, count", "view[2].shape[0], 0, INT16_MAX"),
        ('items of dataset_index", view[0].shape[0], b.size', 'items", view[0].shape[0], 0'),
        ("array[PLACES].shape[0], array[WANTED].shape[0]", "array[PLACES].shape[0], 0"),
        ("array[POINTERS].shape[0], array[LENGTHS].shape[0]", "array[POINTERS].shape[0], 0"),
        ("!!array[MAX_SEQLEN].obj, b->by_document,", "b->by_document, b->by_document,"),
        ("start = 0, pads = size && load", "start = 0, pads = load"),
    ],
}


def split_sections(source):
    """The text of megatron_min.py -> {section number: (begin, end)}; a banner begins each."""
    lines = source.splitlines(keepends=True)
    begins = []
    position = 0
    for number, line in enumerate(lines):
        title = line.removeprefix("# ").partition(".")[0]
        is_banner = line.startswith("# ") and title.isdecimal()
        if is_banner and lines[number - 1].startswith("# ===="):
            begins.append((title, position))
        position += len(line)
    ends = [begin for _, begin in begins[1:]] + [len(source)]
    places = {}
    for (title, begin), end in zip(begins, ends, strict=True):
        places[title] = begin, end
    return places


def put_fault(section, old, new):
    """-> (name of the file, its text with the fault); ValueError if old does not occur once."""
    if section == "C":
        name = "_helpers.c"
        source = (TREE / name).read_text()
        begin, end = 0, len(source)
    else:
        name = "megatron_min.py"
        source = (TREE / name).read_text()
        begin, end = split_sections(source)[section]
    count = source.count(old, begin, end)
    if count != 1:
        raise ValueError(f"section {section}: {old!r} occurs {count} times, wanted once")
    at = source.index(old, begin, end)
    text = source[:at] + new + source[at + len(old) :]
    if name.endswith(".py"):
        compile(text[begin : end - len(old) + len(new)], name, "exec")  # a section: it is faster
    return name, text


def tests_of(section):
    """The tests of a section of the module (those of section 16 for the C file)."""
    if section == "C":
        section = "16"
    suite = (TREE / "test_megatron_min.py").read_text()
    begin, end = split_sections(suite)[section]
    names = re.findall(r"^def (test_\w+)", suite[begin:end], re.MULTILINE)
    return [f"test_megatron_min.py::{name}" for name in names]


def is_noticed(section, name, text, own_tests_only):
    """Does a test fail in a copy of the tree with this text in this file?"""
    with tempfile.TemporaryDirectory() as folder:
        for path in TREE.iterdir():
            if path.is_file():
                shutil.copy2(path, folder)
        pathlib.Path(folder, name).write_text(text)
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "MEGATRON_MIN_C": "1"}
        environment["MEGATRON_MIN_PARITY"] = "1"
        if name.endswith(".c"):
            build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
            built = subprocess.run(build, cwd=folder, env=environment, capture_output=True)
            if built.returncode != 0:
                raise ValueError(f"the fault does not compile: {built.stderr.decode()[-500:]}")
        if fails(tests_of(section), folder, environment):
            return True
        if own_tests_only:
            return False
        return fails(["test_megatron_min.py"], folder, environment)


def fails(tests, folder, environment):
    """Does one of these tests fail in the tree in this folder, or not end?"""
    # in a session of its own, so that processes which a fault left behind end with it
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests],
        cwd=folder,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(SECONDS) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        end_group(process)


def end_group(process):
    """End a suite and what it has started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def check_tree(sections, own_tests_only):
    """The tests must pass without a fault, on both kinds of kernels."""
    name = "megatron_min.py"
    source = (TREE / name).read_text()
    for section in sections:
        if is_noticed(section, name, source, own_tests_only=True):
            sys.exit(f"section {section}: the tests fail without a fault: mend that first")
    if not own_tests_only and is_noticed(sections[0], name, source, own_tests_only=False):
        sys.exit("the suite fails without a fault: mend that first, and build the C kernels")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", default=list(FAULTS), help="such as 12 or C")
    parser.add_argument("--jobs", type=int, default=2, help="suites side by side (default: 2)")
    parser.add_argument("--check", action="store_true", help="only see that each fault fits")
    parser.add_argument("--own", action="store_true", help="try the section's own tests alone")
    options = parser.parse_args()
    faults = []
    misfits = 0
    for section in options.sections:
        for old, new in FAULTS[section]:
            try:
                faults.append((section, old, new, *put_fault(section, old, new)))
            except (ValueError, SyntaxError) as error:
                misfits += 1
                print(error, flush=True)
    print(f"{len(faults)} faults fit the text, {misfits} do not", flush=True)
    if options.check or misfits:
        sys.exit(misfits > 0)
    check_tree(options.sections, options.own)
    survivors = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = {}
        for section, old, new, name, text in faults:
            future = pool.submit(is_noticed, section, name, text, options.own)
            futures[future] = section, old, new
        for done, future in enumerate(concurrent.futures.as_completed(futures), 1):
            if not future.result():
                survivors.append(futures[future])
                section, old, new = futures[future]
                print(f"survives, section {section}: {old!r} -> {new!r}", flush=True)
            print(f"{done} of {len(faults)}, {len(survivors)} survive", file=sys.stderr)
    noticed = len(faults) - len(survivors)
    print(f"{noticed} of {len(faults)} noticed ({noticed / len(faults):.0%})")
    if len(survivors) * 10 > len(faults):
        sys.exit(1)


if __name__ == "__main__":
    main()
