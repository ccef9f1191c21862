// SPDX-License-Identifier: MIT
/* _megatron_min: the four slow loops of megatron_min.py, in C.
 *
 * Every function here has a twin in megatron_min.py.  The twin is the definition: this file only
 * has to give the same bytes, sooner.  The public docstrings are over there; arguments are in 5.
 *
 * Rules of the house
 *   - Python allocates every array; we borrow it through the buffer protocol.  No numpy headers.
 *   - A kernel is a pure loop (no Python objects, no GIL) and one wrapper in six steps: parse,
 *     acquire, validate, compute, report, release.  The loop trusts what the wrapper has checked,
 *     and returns a status, never an exception.
 *   - Arrays may lie at any address (the sizes of an .idx file start at byte 34), so items are
 *     moved by memcpy, which compiles to one plain load or store.
 *   - A blend is computed in IEEE double, each operation rounded.  Build with -ffp-contract=off: a
 *     fused multiply-add gives other blends.
 *
 * Contents    1. Borrowed arrays   2. Sample index   3. Shuffle   4. Blending   5. Module
 */
#ifndef _WIN32
#include <pyconfig.h>                /* says whether this Python has a GIL; Windows has a flag */
#endif
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000    /* 3.11: the first limited API with Py_buffer */
#endif
#include <Python.h>

#include <float.h>
#include <limits.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__FAST_MATH__) || (defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD > 0)
#error "blending needs plain IEEE doubles: no -ffast-math, no x87 registers"
#endif

#if defined(__GNUC__) || defined(__clang__)
#define PREFETCH(address) __builtin_prefetch((const void *)(address))
#define INLINE static inline __attribute__((always_inline))
#elif defined(_MSC_VER)
#define PREFETCH(address) ((void)(address))
#define INLINE static __forceinline
#else
#define PREFETCH(address) ((void)(address))
#define INLINE static inline
#endif

enum { AHEAD = 32 };     /* reads asked for before they are needed; 24 and 64 were slower */

/* ============================= 1. Borrowed arrays =============================
 *
 * A Py_buffer is a view of somebody else's memory.  borrow() fills one and refuses whatever the
 * loops cannot take: another dtype, another number of axes, gaps between items, read-only memory
 * where we write.  Dtypes are written as numpy writes them, "i4" or "u4 i8".
 */

/* Writes the dtype of a view as kind and size, "i4"; kind '?' is anything but one plain number.
 * A buffer format is an optional byte order and a letter.  The letter gives only the kind: int64 is
 * "l" or "q", and an int32 that numpy finds unaligned is "=i". */
static void
dtype_of(const Py_buffer *view, char code[3])
{
    const uint16_t one = 1;
    const char native = *(const unsigned char *)&one ? '<' : '>';
    const char *format = view->format ? view->format : "B";

    if (*format && (strchr("@=^", *format) || *format == native))
        format++;
    if (!format[0] || format[1] || view->itemsize > 8)
        code[0] = '?';
    else
        code[0] = strchr("bhilqn", *format) ? 'i' : strchr("BHILQN", *format) ? 'u'
                : *format == 'd' ? 'f' : '?';
    code[1] = (char)('0' + view->itemsize % 10);
    code[2] = '\0';
}

/* Borrows obj as a C-contiguous array of one of the dtypes wanted, with ndim axes.  Returns 0, or
 * -1 with an exception that names the argument; the view is then empty and safe to release. */
static int
borrow(PyObject *obj, Py_buffer *view, const char *name, const char *wanted, int ndim, int write)
{
    char code[3];

    if (!PyObject_CheckBuffer(obj) || PyObject_GetBuffer(obj, view, PyBUF_FULL_RO) < 0) {
        view->obj = NULL;
        PyErr_Format(PyExc_TypeError, "%s: wanted an array of dtype %s, found %R", name, wanted,
                     (PyObject *)Py_TYPE(obj));
        return -1;
    }
    dtype_of(view, code);
    if (!strstr(wanted, code))
        PyErr_Format(PyExc_TypeError, "%s: wanted dtype %s, found buffer format '%s' (%zd bytes)",
                     name, wanted, view->format ? view->format : "B", view->itemsize);
    else if (view->ndim != ndim)
        PyErr_Format(PyExc_ValueError, "%s: wanted %d axes, found %d", name, ndim, view->ndim);
    else if (!PyBuffer_IsContiguous(view, 'C'))
        PyErr_Format(PyExc_ValueError, "%s: wanted a C-contiguous array, found strides", name);
    else if (write && view->readonly)
        PyErr_Format(PyExc_ValueError, "%s: wanted a writable array, found a read-only one", name);
    else
        return 0;
    PyBuffer_Release(view);
    return -1;
}

/* Returns 0 if two borrowed arrays share no byte, else -1 with ValueError. */
static int
keep_apart(const Py_buffer *a, const char *a_name, const Py_buffer *b, const char *b_name)
{
    const uintptr_t a_at = (uintptr_t)a->buf, b_at = (uintptr_t)b->buf;

    if (!a->len || !b->len ||
        a_at >= b_at + (uintptr_t)b->len || b_at >= a_at + (uintptr_t)a->len)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s and %s: wanted two arrays, found overlapping memory",
                 a_name, b_name);
    return -1;
}

/* Returns 0 if value is low .. high, else -1 with ValueError. */
static int
in_range(const char *name, long long value, long long low, long long high)
{
    if (value >= low && value <= high)
        return 0;
    if (high == LLONG_MAX)
        PyErr_Format(PyExc_ValueError, "%s: wanted at least %lld, found %lld", name, low, value);
    else
        PyErr_Format(PyExc_ValueError, "%s: wanted %lld to %lld, found %lld",
                     name, low, high, value);
    return -1;
}

INLINE int32_t
load_i32(const char *base, Py_ssize_t i)
{
    int32_t value;
    memcpy(&value, base + 4 * i, sizeof value);
    return value;
}

/* ============================== 2. Sample index ===============================
 *
 * Twin: _py_build_sample_idx.  Upstream: build_sample_idx.
 *
 *     document    0       1     2
 *     stream      a a a a b b b c c c c c c      S = 4 tokens in a sample, x = 1 extra
 *     row k       0       1       2       3      (0, 0)  (1, 0)  (2, 1)  (2, 5)
 *     target              5       9       13     k*S + x: tokens read when sample k-1 is complete
 *
 * Invariant: before document d is read, every row whose target lies in documents 0..d-1 is written.
 * Targets only grow, so one forward walk over the documents is enough.
 *
 * Cost: one random read of sizes a document, asked for 32 documents ahead, and one 8- or 16-byte
 * store a row.  Walking documents rather than samples keeps the addresses independent of the sums.
 */
enum { WALK_DONE, WALK_BAD_ID, WALK_BAD_SIZE, WALK_SHORT };

typedef struct {
    int status;             /* one of the above */
    Py_ssize_t position;    /* in document_index, where the walk stopped */
    int64_t value;          /* the bad id, the bad size, or the tokens that were there */
} Walk;

typedef struct {
    char *rows;             /* (N+1, 2), int32 or int64 */
    const char *sizes;      /* (F,) int32, tokens in each document of the file */
    const char *documents;  /* (L,) int32, which document comes d-th in the stream */
    int64_t num_samples;    /* N */
    int64_t num_sizes;      /* F */
    int64_t num_documents;  /* L */
    int64_t sequence;       /* S, in tokens */
    int64_t extra;          /* x, 0 or 1 */
    int64_t last_token;     /* target of row N */
} Stream;

INLINE void
store_row(char *rows, int64_t k, int64_t d, int64_t offset, int wide)
{
    const int64_t wide_row[2] = {d, offset};
    const int32_t row[2] = {(int32_t)d, (int32_t)offset};

    if (wide)
        memcpy(rows + 16 * k, wide_row, sizeof wide_row);
    else
        memcpy(rows + 8 * k, row, sizeof row);
}

/* wide is a constant at both calls, so each gets a loop with one kind of store. */
INLINE Walk
walk_documents(const Stream *s, int wide)
{
    int64_t k = 1, before = 0, target;
    Py_ssize_t d = 0;

    store_row(s->rows, 0, 0, 0, wide);
    if (s->num_samples == 0)
        return (Walk){WALK_DONE, 0, 0};
    target = s->num_samples == 1 ? s->last_token : s->sequence + s->extra;
    for (; d < s->num_documents; d++) {
        const int64_t id = load_i32(s->documents, d);
        int64_t size;

        if (d + AHEAD < s->num_documents)   /* not checked yet, so an address and not a pointer */
            PREFETCH((uintptr_t)s->sizes + 4 * (uintptr_t)load_i32(s->documents, d + AHEAD));
        if (id < 0 || id >= s->num_sizes)
            return (Walk){WALK_BAD_ID, d, id};
        size = load_i32(s->sizes, id);
        if (size < 0)
            return (Walk){WALK_BAD_SIZE, d, size};
        while (before + size >= target) {
            store_row(s->rows, k, d, target - s->extra - before, wide);
            if (k == s->num_samples)
                return (Walk){WALK_DONE, d, 0};
            target = ++k == s->num_samples ? s->last_token : target + s->sequence;
        }
        before += size;
    }
    return (Walk){WALK_SHORT, d, before};
}

/* Returns 0 if the targets are in order and no sum of the walk passes 2^63 (it goes on for at most
 * one document behind the last target), else -1 with ValueError. */
static int
check_targets(const Stream *s, Py_ssize_t itemsize)
{
    const int64_t n = s->num_samples, limit = INT64_MAX - INT32_MAX - 1;

    if (in_range("sequence_length", s->sequence, 1, n ? limit / n : limit) < 0 ||
        in_range("add_extra_token", s->extra, 0, 1) < 0 ||
        in_range("items of document_index", s->num_documents, 0,
                 itemsize == 4 ? INT32_MAX : LLONG_MAX) < 0)
        return -1;
    return n ? in_range("last_token", s->last_token, (n - 1) * s->sequence + s->extra + 1,
                        n * s->sequence + s->extra) : 0;
}

static PyObject *
build_sample_idx(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *rows_obj, *sizes_obj, *documents_obj, *result = NULL;
    Py_buffer rows = {0}, sizes = {0}, documents = {0};   /* releasing an empty view is a no-op */
    long long sequence, extra, last_token;
    Stream s;
    Walk walk;

    /* 1. parse */
    if (!PyArg_ParseTuple(args, "OOOLLL:build_sample_idx", &rows_obj, &sizes_obj, &documents_obj,
                          &sequence, &extra, &last_token))
        return NULL;
    /* 2. acquire */
    if (borrow(rows_obj, &rows, "sample_index", "i4 i8", 2, 1) < 0 ||
        borrow(sizes_obj, &sizes, "sizes", "i4", 1, 0) < 0 ||
        borrow(documents_obj, &documents, "document_index", "i4", 1, 0) < 0)
        goto exit;
    /* 3. validate */
    if (rows.shape[0] < 1 || rows.shape[1] != 2) {
        PyErr_Format(PyExc_ValueError, "sample_index: wanted shape (N+1, 2), found (%zd, %zd)",
                     rows.shape[0], rows.shape[1]);
        goto exit;
    }
    s = (Stream){rows.buf, sizes.buf, documents.buf, rows.shape[0] - 1, sizes.shape[0],
                 documents.shape[0], sequence, extra, last_token};
    if (check_targets(&s, rows.itemsize) < 0 ||
        keep_apart(&rows, "sample_index", &sizes, "sizes") < 0 ||
        keep_apart(&rows, "sample_index", &documents, "document_index") < 0)
        goto exit;
    /* 4. compute */
    Py_BEGIN_ALLOW_THREADS
    walk = rows.itemsize == 8 ? walk_documents(&s, 1) : walk_documents(&s, 0);
    Py_END_ALLOW_THREADS
    /* 5. report */
    if (walk.status == WALK_BAD_ID)
        PyErr_Format(PyExc_IndexError, "document_index[%zd]: wanted 0 to %zd, found %lld",
                     walk.position, sizes.shape[0] - 1, (long long)walk.value);
    else if (walk.status == WALK_BAD_SIZE)
        PyErr_Format(PyExc_ValueError, "sizes[document_index[%zd]]: wanted at least 0, found %lld",
                     walk.position, (long long)walk.value);
    else if (walk.status == WALK_SHORT)
        PyErr_Format(PyExc_ValueError, "document_index: wanted %lld tokens, found %lld",
                     last_token, (long long)walk.value);
    else
        result = Py_NewRef(Py_None);
exit:   /* 6. release */
    PyBuffer_Release(&documents);
    PyBuffer_Release(&sizes);
    PyBuffer_Release(&rows);
    return result;
}

/* ================================= 3. Shuffle =================================
 *
 * Twin: _py_shuffle.  Upstream: numpy.random.RandomState.shuffle, called on a 1-D array.
 *
 * Fisher-Yates from the top, i = n-1 .. 1: swap a[i] with a[j], j uniform in [0, i].  numpy finds j
 * by masked rejection: keep the low bits of a draw, throw it away while it is above i.
 *
 *     i = 5, mask = 7      draws & mask    6  3  7  5  1  2 ..
 *                          i wanted        5  5  4  4  4  3
 *                          accepted           3        1  2      -> j of i = 5, 4, 3
 *
 * Invariant: the w-th accepted draw since i is the partner of i - w, so a draw is stored at place w
 * and counts (w += 1) exactly if it is at most i - w: no branch to mispredict.
 *
 * Cost: about 1.4 draws an item.  The partners of a block are known before its swaps are made, so
 * their cache lines are asked for in time; numpy waits for each.
 */
enum { MT_WORDS = 624, MT_SHIFT = 397 };

typedef struct {
    uint32_t key[MT_WORDS];     /* numpy's state["key"] */
    uint32_t draw[MT_WORDS];    /* the same words, tempered: what the generator returns */
    int pos;                    /* numpy's state["pos"]: draws of this block already used */
} Generator;

/* Mixes one word of the next block from three of the present one. */
INLINE uint32_t
mt_mix(uint32_t high, uint32_t low, uint32_t far)
{
    const uint32_t y = (high & 0x80000000u) | (low & 0x7fffffffu);
    return far ^ (y >> 1) ^ ((0u - (y & 1u)) & 0x9908b0dfu);
}

static void
mt_temper(Generator *g)
{
    for (int k = 0; k < MT_WORDS; k++) {
        uint32_t y = g->key[k];
        y ^= y >> 11;
        y ^= (y << 7) & 0x9d2c5680u;
        y ^= (y << 15) & 0xefc60000u;
        g->draw[k] = y ^ (y >> 18);
    }
}

/* Makes the next 624 draws (Matsumoto and Nishimura, 1998).  Split in three so that no loop
 * reads what it has just written, which lets the compiler use vectors. */
static void
mt_next_block(Generator *g)
{
    uint32_t *key = g->key;
    int k;

    for (k = 0; k < MT_WORDS - MT_SHIFT; k++)
        key[k] = mt_mix(key[k], key[k + 1], key[k + MT_SHIFT]);
    for (; k < MT_WORDS - 1; k++)
        key[k] = mt_mix(key[k], key[k + 1], key[k + MT_SHIFT - MT_WORDS]);
    key[k] = mt_mix(key[k], key[0], key[MT_SHIFT - 1]);
    mt_temper(g);
    g->pos = 0;
}

static uint32_t
mt_draw(Generator *g)
{
    if (g->pos == MT_WORDS)
        mt_next_block(g);
    return g->draw[g->pos++];
}

INLINE void
swap_items(char *items, uint64_t i, uint64_t j, size_t width)
{
    char a[8], b[8];    /* in registers: width is the constant 4 or 8 */

    memcpy(a, items + i * width, width);
    memcpy(b, items + j * width, width);
    memcpy(items + i * width, b, width);
    memcpy(items + j * width, a, width);
}

#ifndef LAST_SHORT_DRAW
#define LAST_SHORT_DRAW 0xffffffffu     /* above it a draw is two words; tests make it small */
#endif

/* The part of the shuffle where i needs more than 32 bits.  Returns the i it stopped at. */
INLINE uint64_t
shuffle_long(char *items, uint64_t i, size_t width, Generator *g)
{
    uint64_t mask = i, j;

    for (int bits = 1; bits < 64; bits *= 2)
        mask |= mask >> bits;
    for (; i > LAST_SHORT_DRAW; i--) {
        while (mask >> 1 >= i)
            mask >>= 1;
        do {
            j = (uint64_t)mt_draw(g) << 32;
            j = (j | mt_draw(g)) & mask;
        } while (j > i);
        swap_items(items, i, j, width);
    }
    return i;
}

INLINE void
shuffle_items(char *items, uint64_t n, size_t width, Generator *g)
{
    uint32_t partner[MT_WORDS], i, mask = UINT32_MAX;

    for (i = (uint32_t)shuffle_long(items, n - 1, width, g); i > 0;) {
        uint32_t count, want = 0;
        while (mask >> 1 >= i)
            mask >>= 1;
        if (g->pos == MT_WORDS)
            mt_next_block(g);
        count = (uint32_t)(MT_WORDS - g->pos);      /* draws to look at: never past the block, */
        if (count > i - (mask >> 1))                /* nor past the last i that has this mask */
            count = i - (mask >> 1);
        for (uint32_t k = 0; k < count; k++) {
            const uint32_t j = g->draw[g->pos + (int)k] & mask;
            partner[want] = j;
            want += j <= i - want;
        }
        g->pos += (int)count;
        for (uint32_t k = 0; k < want && k < AHEAD; k++)
            PREFETCH(items + partner[k] * width);
        for (uint32_t k = 0; k < want; k++) {
            if (k + AHEAD < want)
                PREFETCH(items + partner[k + AHEAD] * width);
            swap_items(items, i - k, partner[k], width);
        }
        i -= want;
    }
}

static PyObject *
shuffle(PyObject *Py_UNUSED(module), PyObject *args)
{
    PyObject *array_obj, *key_obj, *result = NULL;
    Py_buffer array = {0}, key = {0};
    Generator g;

    /* 1. parse */
    if (!PyArg_ParseTuple(args, "OOi:shuffle", &array_obj, &key_obj, &g.pos))
        return NULL;
    /* 2. acquire */
    if (borrow(array_obj, &array, "array", "i4 u4 i8", 1, 1) < 0 ||
        borrow(key_obj, &key, "key", "u4", 1, 1) < 0)
        goto exit;
    /* 3. validate */
    if (in_range("items of key", key.shape[0], MT_WORDS, MT_WORDS) < 0 ||
        in_range("pos", g.pos, 0, MT_WORDS) < 0 || keep_apart(&array, "array", &key, "key") < 0)
        goto exit;
    /* 4. compute */
    Py_BEGIN_ALLOW_THREADS
    memcpy(g.key, key.buf, sizeof g.key);
    mt_temper(&g);
    if (array.shape[0] < 2)
        ;                                           /* nothing to swap, nothing drawn */
    else if (array.itemsize == 8)
        shuffle_items(array.buf, (uint64_t)array.shape[0], 8, &g);
    else
        shuffle_items(array.buf, (uint64_t)array.shape[0], 4, &g);
    memcpy(key.buf, g.key, sizeof g.key);
    Py_END_ALLOW_THREADS
    /* 5. report */
    result = PyLong_FromLong(g.pos);
exit:   /* 6. release */
    PyBuffer_Release(&key);
    PyBuffer_Release(&array);
    return result;
}

/* ================================= 4. Blending ================================
 *
 * Twins: _py_build_blending_indices, _py_build_exhaustive_blending_indices.  Upstream: the same
 * names without _py_.
 *
 * Sample i goes to the dataset that lags most, the lowest d among equals:
 *
 *     lag[d] = weight[d] * max(i, 1) - taken[d]          rounded twice, as IEEE double
 *
 * Up to 64 datasets are all looked at for every sample.  With more, nearly all of that is wasted on
 * datasets that were drawn a moment ago.  So we go in runs of R samples (R * R >= 2 * D), and look
 * in a run only at the candidates: those that would reach a bar by its end if they were left alone.
 *
 *     lag
 *      |   a ____________----  <- ends above the bar: a candidate
 *      | - - - - - - - - - - - - - - - - - - bar
 *      |   b ___________-----  <- ends below the bar: not looked at in this run
 *      |   c ______
 *      |           \_________  <- a draw takes 1 off
 *      +---|-----------------|---> i
 *        first             last
 *
 * Invariant: a winner at or above the bar is the winner of the plain rule.  Proof, for a dataset d
 * that is no candidate, at any step i of the run:
 *   (1) weight[d] * i <= weight[d] * last in real numbers, as weight[d] >= 0;
 *   (2) rounding never swaps two numbers, so (1) still holds once both sides are rounded, and again
 *       once the same taken[d] is subtracted and both are rounded: lag at i <= lag at last;
 *   (3) taken[d] is what it was when the candidates were picked, since d was not drawn;
 *   (4) so lag of d at i <= lag of d at last < bar <= lag of the winner: d loses, without a tie.
 * Nothing is estimated, so this holds for any weights.  Where the best candidate is below the bar
 * the run ends before that sample.  The next bar lies below that candidate, which is at most the
 * true winner, so the next run takes that sample: of two runs one at least advances.
 *
 * Equals: behind R datasets in a row with its own weight and count, a dataset cannot be drawn
 * within R samples (each of the R comes first until it is drawn), so it is left out too.
 *
 * Cost: about sqrt(D) a sample instead of D (4096 random weights: 0.15 us against 5.6 us).  How far
 * the bar lies below the last winner decides the speed only, and follows how the runs end.  Weights
 * that are almost equal, but not quite, are the worst case: most datasets stay candidates.
 */
enum { LANES = 4, FEW = 16, MANY = 64 };

typedef struct {
    Py_ssize_t count;   /* datasets; LANES places of padding follow, with a lag of -infinity */
    double *weight;     /* per sample */
    double *taken;      /* samples drawn so far; infinity once the dataset is used up */
    double *limit;      /* samples it has; infinity if it never runs out */
    int16_t *number;    /* which dataset this candidate is */
} Datasets;

/* A pack is PACK lags side by side: two in a vector of any x86-64, else one.  By hand, because no
 * compiler may reorder a maximum of doubles; at 64 datasets this halves the time. */
#if defined(__SSE2__) || defined(_M_X64)
#include <emmintrin.h>
typedef __m128d Pack;
enum { PACK = 2 };
#define PACK_LAGS(weight, taken, step) \
    _mm_sub_pd(_mm_mul_pd(_mm_loadu_pd(weight), _mm_set1_pd(step)), _mm_loadu_pd(taken))
#define PACK_MAX(a, b) _mm_max_pd(a, b)
#define PACK_REACHES(a, bar) _mm_movemask_pd(_mm_cmpge_pd(a, _mm_set1_pd(bar)))  /* a bit a lag */
#define PACK_TOP(a) _mm_cvtsd_f64(_mm_max_sd(a, _mm_unpackhi_pd(a, a)))
#else
typedef double Pack;
enum { PACK = 1 };
#define PACK_LAGS(weight, taken, step) (*(weight) * (step) - *(taken))
#define PACK_MAX(a, b) ((a) > (b) ? (a) : (b))
#define PACK_REACHES(a, bar) ((a) >= (bar))
#define PACK_TOP(a) (a)
#endif

/* Writes the padding. */
static void
pad(Datasets *some)
{
    for (Py_ssize_t k = some->count; k < some->count + LANES; k++) {
        some->weight[k] = 0.0;
        some->taken[k] = INFINITY;
    }
}

/* Returns the first place with the largest lag; *top is that lag.  Several maxima go side by side,
 * as each comparison waits for the one before it. */
INLINE Py_ssize_t
find_top(const Datasets *some, double step, double *top)
{
    const double *weight = some->weight, *taken = some->taken;
    Pack best[LANES / PACK], lags;
    Py_ssize_t d;
    int mask;

    for (int k = 0; k < LANES / PACK; k++)
        best[k] = PACK_LAGS(weight + k * PACK, taken + k * PACK, step);
    for (d = LANES; d < some->count; d += LANES)
        for (int k = 0; k < LANES / PACK; k++) {
            lags = PACK_LAGS(weight + d + k * PACK, taken + d + k * PACK, step);
            best[k] = PACK_MAX(best[k], lags);
        }
    for (int k = 1; k < LANES / PACK; k++)
        best[0] = PACK_MAX(best[0], best[k]);
    *top = PACK_TOP(best[0]);
    for (d = 0;; d += PACK) {
        lags = PACK_LAGS(weight + d, taken + d, step);
        mask = PACK_REACHES(lags, *top);
        if (mask)
            return d + !(mask & 1);
    }
}

/* Copies into some the datasets of all that reach the bar by step last.  Each is written behind the
 * ones picked, and counts (n += 1) only if it is picked: no branch to mispredict. */
static void
pick_candidates(const Datasets *all, Datasets *some, double last, double bar, Py_ssize_t run)
{
    double weight = -1.0, taken = -1.0;
    Py_ssize_t n = 0, same = 0;             /* same: datasets in a row equal to this one */

    for (Py_ssize_t d = 0; d < all->count; d += LANES) {
        int mask = 0;
        for (int k = 0; k < LANES; k += PACK) {
            const Pack lags = PACK_LAGS(all->weight + d + k, all->taken + d + k, last);
            mask |= PACK_REACHES(lags, bar) << k;
        }
        if (!mask)
            continue;
        for (int k = 0; k < LANES; k++) {
            const int equal = (all->weight[d + k] == weight) & (all->taken[d + k] == taken);

            same = equal ? same + 1 : 0;
            some->weight[n] = weight = all->weight[d + k];
            some->taken[n] = taken = all->taken[d + k];
            some->number[n] = (int16_t)(d + k);
            n += (mask >> k & 1) & (same < run);
        }
    }
    some->count = n;
    pad(some);
}

typedef struct {
    Datasets all, candidates;
    char *dataset_index;            /* (size,) int16, which dataset sample i comes from */
    char *dataset_sample_index;     /* (size,) int64, which sample of that dataset it is */
    Py_ssize_t size;
} Blend;

/* Writes entry i: the next sample of dataset d. */
INLINE void
draw(Blend *b, Py_ssize_t i, int16_t d)
{
    const double taken = b->all.taken[d];
    const int64_t sample = (int64_t)taken;      /* exact: no array has 2**53 items */

    b->all.taken[d] = taken + 1.0;
    if (taken + 1.0 >= b->all.limit[d])
        b->all.taken[d] = INFINITY;
    memcpy(b->dataset_index + 2 * i, &d, sizeof d);
    memcpy(b->dataset_sample_index + 8 * i, &sample, sizeof sample);
}

/* The plain rule.  Up to FEW datasets nothing is faster. */
static void
blend_few(Blend b)
{
    const double *weight = b.all.weight, *taken = b.all.taken;

    for (Py_ssize_t i = 0; i < b.size; i++) {
        const double step = (double)(i > 1 ? i : 1);
        double top = -INFINITY;
        int16_t winner = 0;

        for (Py_ssize_t d = 0; d < b.all.count; d++) {
            const double lag = weight[d] * step - taken[d];
            if (lag > top) {
                top = lag;
                winner = (int16_t)d;
            }
        }
        draw(&b, i, winner);
    }
}

/* The same in runs; up to MANY datasets one run in which all are candidates. */
static void
blend_many(Blend b)
{
    Datasets *all = &b.all, *candidates = &b.candidates;
    double bar = -DBL_MAX, margin = 1.0, top = 0.0;     /* -DBL_MAX: any lag but -infinity */
    Py_ssize_t i = 0, run = 1;

    while (run * run < 2 * all->count)
        run++;
    if (all->count <= MANY)
        run = b.size;
    while (i < b.size) {
        const Py_ssize_t end = run < b.size - i ? i + run : b.size;

        pick_candidates(all, candidates, (double)(end > 2 ? end - 1 : 1), bar, run);
        for (; i < end; i++) {
            const Py_ssize_t place = find_top(candidates, (double)(i > 1 ? i : 1), &top);
            if (top < bar)
                break;
            draw(&b, i, candidates->number[place]);
            candidates->taken[place] = all->taken[candidates->number[place]];
        }
        margin *= i == end ? 0.9 : 1.5;
        margin = margin > 1e-5 ? margin : 1e-5;
        bar = top - margin > -DBL_MAX ? top - margin : -DBL_MAX;
    }
}

/* Reads D weights for an endless blend of size samples.  Returns 0, or -1 with ValueError. */
static int
read_weights(Datasets *all, const Py_buffer *weights)
{
    for (Py_ssize_t d = 0; d < all->count; d++) {
        PyObject *found;

        memcpy(&all->weight[d], (const char *)weights->buf + 8 * d, sizeof(double));
        all->limit[d] = INFINITY;
        if (all->weight[d] >= 0.0 && all->weight[d] <= DBL_MAX)
            continue;
        found = PyFloat_FromDouble(all->weight[d]);
        PyErr_Format(PyExc_ValueError, "weights[%zd]: wanted a finite number, at least 0, found %S",
                     d, found);             /* %S prints a NULL as <NULL> */
        Py_XDECREF(found);
        return -1;
    }
    return 0;
}

/* Reads D sizes, sets *total to their sum.  Returns 0, or -1 with ValueError. */
static int
read_sizes(Datasets *all, const Py_buffer *sizes, Py_ssize_t *total)
{
    int64_t size, sum = 0;

    for (Py_ssize_t d = 0; d < all->count; d++, sum += size) {
        memcpy(&size, (const char *)sizes->buf + 8 * d, sizeof size);
        if (size < 0 || size > PY_SSIZE_T_MAX - sum) {
            PyErr_Format(PyExc_ValueError, "sizes[%zd]: wanted at least 0 and a total below 2**63, "
                         "found %lld", d, (long long)size);
            return -1;
        }
        all->limit[d] = (double)size;
        all->taken[d] = size ? 0.0 : INFINITY;
    }
    for (Py_ssize_t d = 0; d < all->count; d++)
        all->weight[d] = sum ? all->limit[d] / (double)sum : 0.0;
    *total = (Py_ssize_t)sum;
    return 0;
}

/* Carves one allocation into two sets of D datasets.  Returns it, or NULL with MemoryError. */
static double *
allocate_datasets(Blend *b, Py_ssize_t count)
{
    const size_t places = (size_t)count + LANES;
    double *memory = PyMem_Calloc(places, 5 * sizeof(double) + sizeof(int16_t));

    if (!memory) {
        PyErr_NoMemory();
        return NULL;
    }
    b->all = (Datasets){count, memory, memory + places, memory + 2 * places, NULL};
    b->candidates = (Datasets){0, memory + 3 * places, memory + 4 * places, NULL,
                               (int16_t *)(memory + 5 * places)};
    pad(&b->all);
    return memory;
}

/* The wrapper of both: exhaustive takes counts and works out the size, the other takes weights. */
static PyObject *
build_blend(PyObject *args, int exhaustive)
{
    const char *input_name = exhaustive ? "sizes" : "weights";
    PyObject *index_obj, *sample_obj, *input_obj, *result = NULL;
    Py_buffer index = {0}, sample = {0}, input = {0};
    Py_ssize_t count, size = 0;
    double *memory = NULL;
    Blend b;

    /* 1. parse */
    if (!PyArg_ParseTuple(args, exhaustive ? "OOOn:build_exhaustive_blending_indices"
                                           : "OOOnn:build_blending_indices",
                          &index_obj, &sample_obj, &input_obj, &count, &size))
        return NULL;
    /* 2. acquire */
    if (borrow(index_obj, &index, "dataset_index", "i2", 1, 1) < 0 ||
        borrow(sample_obj, &sample, "dataset_sample_index", "i8", 1, 1) < 0 ||
        borrow(input_obj, &input, input_name, exhaustive ? "i8" : "f8", 1, 0) < 0)
        goto exit;
    /* 3. validate */
    if (in_range("num_datasets", count, 1, INT16_MAX) < 0 ||
        in_range(input_name, input.shape[0], count, LLONG_MAX) < 0 ||
        keep_apart(&index, "dataset_index", &sample, "dataset_sample_index") < 0 ||
        keep_apart(&index, "dataset_index", &input, input_name) < 0 ||
        keep_apart(&sample, "dataset_sample_index", &input, input_name) < 0 ||
        !(memory = allocate_datasets(&b, count)) ||
        (exhaustive ? read_sizes(&b.all, &input, &size) : read_weights(&b.all, &input)) < 0 ||
        in_range("size", size, 0, LLONG_MAX) < 0 ||
        in_range("items of dataset_index", index.shape[0], size, LLONG_MAX) < 0 ||
        in_range("items of dataset_sample_index", sample.shape[0], size, LLONG_MAX) < 0)
        goto exit;
    b.dataset_index = index.buf;
    b.dataset_sample_index = sample.buf;
    b.size = size;
    /* 4. compute */
    Py_BEGIN_ALLOW_THREADS
    if (count <= FEW)
        blend_few(b);
    else
        blend_many(b);
    Py_END_ALLOW_THREADS
    /* 5. report */
    result = Py_NewRef(Py_None);
exit:   /* 6. release */
    PyMem_Free(memory);
    PyBuffer_Release(&input);
    PyBuffer_Release(&sample);
    PyBuffer_Release(&index);
    return result;
}

static PyObject *
build_blending_indices(PyObject *Py_UNUSED(module), PyObject *args)
{
    return build_blend(args, 0);
}

static PyObject *
build_exhaustive_blending_indices(PyObject *Py_UNUSED(module), PyObject *args)
{
    return build_blend(args, 1);
}

/* ================================== 5. Module ================================= */

static PyMethodDef methods[] = {
    {"build_sample_idx", build_sample_idx, METH_VARARGS,
     "build_sample_idx(sample_index, sizes, document_index, sequence_length, add_extra_token, "
     "last_token)\n--\n\nFill sample_index."},
    {"shuffle", shuffle, METH_VARARGS,
     "shuffle(array, key, pos)\n--\n\nRandomState.shuffle in place; returns the new pos."},
    {"build_blending_indices", build_blending_indices, METH_VARARGS,
     "build_blending_indices(dataset_index, dataset_sample_index, weights, num_datasets, size)\n"
     "--\n\nFill both indices by weight."},
    {"build_exhaustive_blending_indices", build_exhaustive_blending_indices, METH_VARARGS,
     "build_exhaustive_blending_indices(dataset_index, dataset_sample_index, sizes, num_datasets)\n"
     "--\n\nFill both indices until every dataset is used up."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};      /* no state, nothing to execute at import */

static struct PyModuleDef definition = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_megatron_min",
    .m_doc = "The loops of megatron_min.py in C.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC
PyInit__megatron_min(void)
{
    return PyModuleDef_Init(&definition);
}
