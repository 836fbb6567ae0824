/* Attention with capped scores in float32, forward and backward: capped_kernel.py calls it.

   A score is  cap tanh(scale q.k / cap) = 2 cap level - cap,  where the constant drops out of the
   softmax and

       level = 1 / (1 + 2^(band q.k)),  band = -2 scale log2(e) / cap,  lies from 0 to 1,
       weight = 2^(slope (level - top) - log_total),  slope = 2 cap log2(e).

   Scores live in tiles of QUERIES x KEYS, a few hundred KB for each thread. Threads take one head
   after the other; what is summed in which order depends on no thread. "Padded" is filled up with
   zeros: a width to whole vectors, keys to whole panels. */

#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, VECTORS = 4 };
#else
enum { LANES = 8, VECTORS = 2 };
#endif
enum {
    ROWS = 6,     /* ROWS x VECTORS sums and what they are made of fill the registers */
    DEPTH = 64,   /* terms of a sum at a time: DEPTH x PANEL numbers stay in the first cache */
    PANEL = 64,   /* keys side by side, for products along the width of a head */
    QUERIES = 192, /* half or twice as many, of keys too: the same time within a twentieth */
    KEYS = 256,
    ALIGNMENT = 16
};

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
#define INLINE static inline __attribute__((always_inline))

/* Rows of a head's width without gaps; strides in floats. */
typedef struct {
    float *data;
    int64_t sample, head, row;
} Rows;

/* Whether a query may attend to a key, a byte each, keys without gaps; strides in bytes. */
typedef struct {
    const uint8_t *data; /* NULL: everything may be attended to */
    int64_t sample, head, row;
} Mask;

typedef struct {
    int64_t num_samples, num_heads, num_queries, num_keys, width, value_width, is_causal;
    float band, slope;
    float factor; /* 4 scale: of a score by q.k, over level (1 - level) */
    Rows query, key, value, output, grad_output, grad_query, grad_key, grad_value;
    Mask mask;
    const float *sink_level; /* [heads], or NULL */
    float *top, *log_total;  /* [samples, heads, queries]: the highest level, log2 of the sum */
    const float *moved;      /* likewise: gradient of the output times the output */
} Call;

int64_t size_of_call(void) { return sizeof(Call); }

static int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t round_up(int64_t size, int64_t to) { return (size + to - 1) / to * to; }

/* ---- Products of matrices ---- */

typedef struct {
    float *data;
    int64_t row, column; /* strides */
} Matrix;

INLINE Matrix at(Matrix m, int64_t row, int64_t column) {
    return (Matrix){m.data + row * m.row + column * m.column, m.row, m.column};
}

/* c = a b, or c += a b, of so many rows and so many vectors of columns. */
INLINE void block(const int rows, const int vectors, int adds, int64_t depth, Matrix a, Matrix b,
                  Matrix c) {
    vector sum[ROWS][VECTORS] = {0};
    if (adds)
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < vectors; j++)
                sum[i][j] = *(const vector *)(c.data + i * c.row + j * LANES);
    for (int64_t k = 0; k < depth; k++) {
        vector right[VECTORS];
        for (int j = 0; j < vectors; j++)
            right[j] = *(const vector *)(b.data + k * b.row + j * LANES);
        for (int i = 0; i < rows; i++) {
            float left = a.data[i * a.row + k * a.column];
            for (int j = 0; j < vectors; j++) sum[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            *(vector *)(c.data + i * c.row + j * LANES) = sum[i][j];
}

INLINE void strip(const int vectors, int adds, int64_t rows, int64_t depth, Matrix a, Matrix b,
                  Matrix c) {
    int64_t i = 0;
    for (; i + ROWS <= rows; i += ROWS)
        block(ROWS, vectors, adds, depth, at(a, i, 0), b, at(c, i, 0));
    for (; i + 2 <= rows; i += 2) block(2, vectors, adds, depth, at(a, i, 0), b, at(c, i, 0));
    for (; i < rows; i++) block(1, vectors, adds, depth, at(a, i, 0), b, at(c, i, 0));
}

/* c = a b, or c += a b: the columns of b and c without gaps, a multiple of ALIGNMENT of them. */
static void multiply(int adds, int64_t rows, int64_t columns, int64_t depth, Matrix a, Matrix b,
                     Matrix c) {
    for (int64_t k = 0; k < depth; k += DEPTH) {
        int64_t some = min_of(DEPTH, depth - k), j = 0;
        Matrix left = at(a, 0, k);
        for (; j + VECTORS * LANES <= columns; j += VECTORS * LANES)
            strip(VECTORS, adds || k, rows, some, left, at(b, k, j), at(c, 0, j));
        for (; j < columns; j += LANES)
            strip(1, adds || k, rows, some, left, at(b, k, j), at(c, 0, j));
    }
}

/* ---- Moving numbers ---- */

static float *head_of(const Rows *rows, int64_t sample, int64_t head) {
    return rows->data + sample * rows->sample + head * rows->head;
}

/* Copy rows to padded rows of a padded width. */
static void pack(const float *from, int64_t stride, int64_t num_rows, int64_t num_padded,
                 int64_t width, float *to) {
    int64_t padded = round_up(width, ALIGNMENT);
    for (int64_t i = 0; i < num_rows; i++) {
        memcpy(to + i * padded, from + i * stride, width * sizeof(float));
        memset(to + i * padded + width, 0, (padded - width) * sizeof(float));
    }
    memset(to + num_rows * padded, 0, (num_padded - num_rows) * padded * sizeof(float));
}

/* Copy rows to columns, in padded panels [padded width][PANEL]. */
static void pack_columns(const float *from, int64_t stride, int64_t num_rows, int64_t width,
                         float *to) {
    int64_t padded = round_up(width, ALIGNMENT);
    for (int64_t first = 0; first < num_rows; first += PANEL, to += padded * PANEL) {
        int64_t some = min_of(PANEL, num_rows - first);
        if (some < PANEL || width < padded) memset(to, 0, padded * PANEL * sizeof(float));
        for (int64_t i = 0; i < some; i++)
            for (int64_t d = 0; d < width; d++)
                to[d * PANEL + i] = from[(first + i) * stride + d];
    }
}

/* Copy padded rows, times a factor, to where they belong. */
static void unpack(const Rows *rows, int64_t sample, int64_t head, int64_t start,
                   int64_t num_rows, int64_t width, const float *from, float factor) {
    int64_t padded = round_up(width, ALIGNMENT);
    float *to = head_of(rows, sample, head) + start * rows->row;
    for (int64_t i = 0; i < num_rows; i++)
        for (int64_t d = 0; d < width; d++)
            to[i * rows->row + d] = factor * from[i * padded + d];
}

/* Cut the room of a thread into parts. */
static void carve(float *room, const int64_t *sizes, int num_parts, float **parts) {
    for (int i = 0; i < num_parts; room += sizes[i++]) parts[i] = room;
}

static int64_t total_of(const int64_t *sizes, int num_parts) {
    int64_t total = 0;
    for (int i = 0; i < num_parts; i++) total += sizes[i];
    return total;
}

/* ---- Tiles of scores ---- */

/* Some queries and keys of a head: `wide` is num_keys, padded. */
typedef struct {
    int64_t sample, head, query, num_queries, key, num_keys, wide;
} Tile;

/* How many keys, from one on, the causal rule lets a query see. */
static int64_t num_seen(const Call *call, int64_t query, int64_t from, int64_t num_keys) {
    int64_t past = call->num_keys - call->num_queries, seen = past + query + 1 - from;
    if (!call->is_causal || seen > num_keys) return num_keys;
    return seen > 0 ? seen : 0;
}

/* The first query, counted from one on, that sees a key. */
static int64_t first_seeing(const Call *call, int64_t from, int64_t key) {
    int64_t past = call->num_keys - call->num_queries, first = key - past - from;
    return call->is_causal && first > 0 ? first : 0;
}

static const uint8_t *mask_row(const Call *call, const Tile *tile, int64_t row) {
    const Mask *mask = &call->mask;
    if (!mask->data) return NULL;
    return mask->data + tile->sample * mask->sample + tile->head * mask->head +
           (tile->query + row) * mask->row + tile->key;
}

/* numbers[i][j] = rows[i] . columns[j], where a query sees one of a panel's keys. */
static void products(const Call *call, const Tile *tile, int64_t width, float *rows,
                     float *columns, float *numbers) {
    for (int64_t p = 0; p < tile->wide; p += PANEL) {
        int64_t first = first_seeing(call, tile->query, tile->key + p);
        multiply(0, tile->num_queries - first, PANEL, width,
                 (Matrix){rows + first * width, width, 1},
                 (Matrix){columns + p * width, PANEL, 1},
                 (Matrix){numbers + first * KEYS + p, KEYS, 1});
    }
}

/* sums[i] += sum_j numbers[i][j] rows[j] */
static void add_rows(const Call *call, const Tile *tile, int64_t width, float *numbers,
                     float *rows, float *sums) {
    for (int64_t p = 0; p < tile->wide; p += PANEL) {
        int64_t first = first_seeing(call, tile->query, tile->key + p);
        multiply(1, tile->num_queries - first, width, PANEL,
                 (Matrix){numbers + first * KEYS + p, KEYS, 1},
                 (Matrix){rows + p * width, width, 1}, (Matrix){sums + first * width, width, 1});
    }
}

/* sums[j] += sum_i numbers[i][j] rows[i] */
static void add_columns(const Call *call, const Tile *tile, int64_t width, float *numbers,
                        float *rows, float *sums) {
    for (int64_t p = 0; p < tile->wide; p += PANEL) {
        int64_t first = first_seeing(call, tile->query, tile->key + p);
        multiply(1, PANEL, width, tile->num_queries - first,
                 (Matrix){numbers + first * KEYS + p, 1, KEYS},
                 (Matrix){rows + first * width, width, 1}, (Matrix){sums + p * width, width, 1});
    }
}

/* 2^x within 1e-7 of itself: 0 below the smallest normal number, 2^127 above that, NaN of NaN.

   The polynomial is the best of its degree for 2^rest, |rest| <= 1/2, that is 1 at 0; fitted by
   weighted least squares to a largest relative error of 2e-9. */
INLINE float power(float x) {
    float held = x > 127.0f ? 127.0f : x, whole = rintf(held);
    whole = whole >= -126.0f ? whole : -126.0f; /* of NaN, too */
    float rest = held - whole;
    float sum = 1.53533606e-4f;
    sum = sum * rest + 1.33988749e-3f;
    sum = sum * rest + 9.61843737e-3f;
    sum = sum * rest + 5.55033247e-2f;
    sum = sum * rest + 2.40226479e-1f;
    sum = sum * rest + 6.93147203e-1f;
    sum = sum * rest + 1.0f;
    union {
        int32_t bits;
        float value;
    } scale = {.bits = ((int32_t)whole + 127) << 23};
    return x < -126.0f ? 0.0f : sum * scale.value;
}

/* ---- Forward ---- */

enum { KEY_COLUMNS, VALUE, QUERY, SCORES, SUMS, FORWARD_PARTS };

static void forward_sizes(const Call *call, int64_t *sizes) {
    int64_t width = round_up(call->width, ALIGNMENT);
    int64_t value_width = round_up(call->value_width, ALIGNMENT);
    int64_t num_padded = round_up(call->num_keys, PANEL);
    sizes[KEY_COLUMNS] = num_padded * width;
    sizes[VALUE] = num_padded * value_width;
    sizes[QUERY] = QUERIES * width;
    sizes[SCORES] = QUERIES * KEYS;
    sizes[SUMS] = QUERIES * value_width;
}

/* Turn a row of products into weights from the highest level on; return their sum. */
static float weigh(const Call *call, float *row, int64_t seen, int64_t wide, const uint8_t *mask,
                   float *top) {
    float band = call->band, slope = call->slope, highest = *top, sum = 0.0f;
    for (int64_t j = 0; j < seen; j++) row[j] = 1.0f / (1.0f + power(band * row[j]));
    if (mask)
        for (int64_t j = 0; j < seen; j++) row[j] = mask[j] ? row[j] : -INFINITY;
#pragma omp simd reduction(max : highest)
    for (int64_t j = 0; j < seen; j++) highest = row[j] > highest ? row[j] : highest;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < seen; j++) {
        float weight = power(slope * (row[j] - highest));
        row[j] = weight;
        sum += weight;
    }
    for (int64_t j = seen; j < wide; j++) row[j] = 0.0f;
    *top = highest;
    return sum;
}

/* Weigh a tile; the sums so far are brought to the highest level of their row. */
static void weigh_tile(const Call *call, const Tile *tile, int64_t value_width, float *scores,
                       float *sums, float *top, float *total) {
    for (int64_t i = 0; i < tile->num_queries; i++) {
        int64_t seen = num_seen(call, tile->query + i, tile->key, tile->num_keys);
        float before = top[i];
        float sum = weigh(call, scores + i * KEYS, seen, tile->wide, mask_row(call, tile, i),
                          top + i);
        float kept = power(call->slope * (before - top[i]));
        if (kept != 1.0f) { /* NaN of an infinite sink, which stays visible */
            total[i] *= kept;
            for (int64_t d = 0; d < value_width; d++) sums[i * value_width + d] *= kept;
        }
        total[i] += sum;
    }
}

static void attend(const Call *call, int64_t sample, int64_t head, float *room) {
    int64_t width = round_up(call->width, ALIGNMENT), sizes[FORWARD_PARTS];
    int64_t value_width = round_up(call->value_width, ALIGNMENT), num_keys = call->num_keys;
    float *parts[FORWARD_PARTS];
    forward_sizes(call, sizes);
    carve(room, sizes, FORWARD_PARTS, parts);
    pack_columns(head_of(&call->key, sample, head), call->key.row, num_keys, call->width,
                 parts[KEY_COLUMNS]);
    pack(head_of(&call->value, sample, head), call->value.row, num_keys,
         round_up(num_keys, PANEL), call->value_width, parts[VALUE]);
    for (int64_t start = 0; start < call->num_queries; start += QUERIES) {
        int64_t num_queries = min_of(QUERIES, call->num_queries - start);
        int64_t index = (sample * call->num_heads + head) * call->num_queries + start;
        float *top = call->top + index, *log_total = call->log_total + index, total[QUERIES];
        for (int64_t i = 0; i < num_queries; i++) {
            top[i] = call->sink_level ? call->sink_level[head] : 0.0f; /* no level is lower */
            total[i] = call->sink_level ? 1.0f : 0.0f;
        }
        memset(parts[SUMS], 0, num_queries * value_width * sizeof(float));
        pack(head_of(&call->query, sample, head) + start * call->query.row, call->query.row,
             num_queries, num_queries, call->width, parts[QUERY]);
        int64_t stop = num_seen(call, start + num_queries - 1, 0, num_keys);
        for (int64_t key = 0; key < stop; key += KEYS) {
            int64_t most = min_of(KEYS, stop - key), wide = round_up(most, PANEL);
            Tile tile = {sample, head, start, num_queries, key, most, wide};
            products(call, &tile, width, parts[QUERY], parts[KEY_COLUMNS] + key * width,
                     parts[SCORES]);
            weigh_tile(call, &tile, value_width, parts[SCORES], parts[SUMS], top, total);
            add_rows(call, &tile, value_width, parts[SCORES], parts[VALUE] + key * value_width,
                     parts[SUMS]);
        }
        for (int64_t i = 0; i < num_queries; i++) {
            /* The highest level counts as one: less is a query that sees nothing. */
            float sum = total[i] < 0.5f ? 0.5f : total[i];
            log_total[i] = log2f(sum);
            unpack(&call->output, sample, head, start + i, 1, call->value_width,
                   parts[SUMS] + i * value_width, 1.0f / sum);
        }
    }
}

/* ---- Backward ---- */

enum {
    B_QUERY, B_GRAD, B_GRAD_QUERY, /* of the whole head */
    B_KEY, B_KEY_COLUMNS, B_VALUE_COLUMNS, B_GRAD_KEY, B_GRAD_VALUE, /* of a tile's keys */
    B_WEIGHTS, B_CHANGES, BACKWARD_PARTS
};

static void backward_sizes(const Call *call, int64_t *sizes) {
    int64_t width = round_up(call->width, ALIGNMENT);
    int64_t value_width = round_up(call->value_width, ALIGNMENT);
    sizes[B_QUERY] = sizes[B_GRAD_QUERY] = call->num_queries * width;
    sizes[B_GRAD] = call->num_queries * value_width;
    sizes[B_KEY] = sizes[B_KEY_COLUMNS] = sizes[B_GRAD_KEY] = KEYS * width;
    sizes[B_VALUE_COLUMNS] = sizes[B_GRAD_VALUE] = KEYS * value_width;
    sizes[B_WEIGHTS] = sizes[B_CHANGES] = QUERIES * KEYS;
}

/* Turn products into weights, and gradients of weights into those of the products, over factor. */
static void change_tile(const Call *call, const Tile *tile, float *weights, float *changes) {
    int64_t index = (tile->sample * call->num_heads + tile->head) * call->num_queries;
    float band = call->band, slope = call->slope;
    for (int64_t i = 0; i < tile->num_queries; i++) {
        int64_t query = tile->query + i;
        int64_t seen = num_seen(call, query, tile->key, tile->num_keys);
        float top = call->top[index + query], log_total = call->log_total[index + query];
        float moved = call->moved[index + query];
        float *row = weights + i * KEYS, *change = changes + i * KEYS;
        const uint8_t *mask = mask_row(call, tile, i);
#pragma omp simd
        for (int64_t j = 0; j < seen; j++) {
            /* The level and its distance from 1, the larger one first: neither loses digits. */
            float exponent = band * row[j], odds = power(-fabsf(exponent));
            float larger = 1.0f / (1.0f + odds), smaller = odds * larger;
            float level = exponent > 0.0f ? smaller : larger;
            float weight = power(slope * (level - top) - log_total);
            row[j] = weight;
            change[j] = (change[j] - moved) * weight * (larger * smaller);
        }
        if (mask) /* Chosen, not multiplied: of a query that sees nothing, weights overflow. */
            for (int64_t j = 0; j < seen; j++) {
                row[j] = mask[j] ? row[j] : 0.0f;
                change[j] = mask[j] ? change[j] : 0.0f;
            }
        for (int64_t j = seen; j < tile->wide; j++) row[j] = change[j] = 0.0f;
    }
}

static void differentiate(const Call *call, int64_t sample, int64_t head, float *room) {
    int64_t width = round_up(call->width, ALIGNMENT), sizes[BACKWARD_PARTS];
    int64_t value_width = round_up(call->value_width, ALIGNMENT);
    int64_t num_queries = call->num_queries;
    float *parts[BACKWARD_PARTS];
    backward_sizes(call, sizes);
    carve(room, sizes, BACKWARD_PARTS, parts);
    pack(head_of(&call->query, sample, head), call->query.row, num_queries, num_queries,
         call->width, parts[B_QUERY]);
    pack(head_of(&call->grad_output, sample, head), call->grad_output.row, num_queries,
         num_queries, call->value_width, parts[B_GRAD]);
    memset(parts[B_GRAD_QUERY], 0, num_queries * width * sizeof(float));
    for (int64_t first = 0; first < call->num_keys; first += KEYS) {
        int64_t num_keys = min_of(KEYS, call->num_keys - first);
        const float *key = head_of(&call->key, sample, head) + first * call->key.row;
        const float *value = head_of(&call->value, sample, head) + first * call->value.row;
        pack(key, call->key.row, num_keys, KEYS, call->width, parts[B_KEY]);
        pack_columns(key, call->key.row, num_keys, call->width, parts[B_KEY_COLUMNS]);
        pack_columns(value, call->value.row, num_keys, call->value_width, parts[B_VALUE_COLUMNS]);
        memset(parts[B_GRAD_KEY], 0, KEYS * width * sizeof(float));
        memset(parts[B_GRAD_VALUE], 0, KEYS * value_width * sizeof(float));
        for (int64_t start = first_seeing(call, 0, first); start < num_queries; start += QUERIES) {
            int64_t some = min_of(QUERIES, num_queries - start);
            int64_t most = num_seen(call, start + some - 1, first, num_keys);
            Tile tile = {sample, head, start, some, first, most, round_up(most, PANEL)};
            float *query = parts[B_QUERY] + start * width;
            float *grad = parts[B_GRAD] + start * value_width;
            float *weights = parts[B_WEIGHTS], *changes = parts[B_CHANGES];
            products(call, &tile, width, query, parts[B_KEY_COLUMNS], weights);
            products(call, &tile, value_width, grad, parts[B_VALUE_COLUMNS], changes);
            change_tile(call, &tile, weights, changes);
            add_columns(call, &tile, value_width, weights, grad, parts[B_GRAD_VALUE]);
            add_columns(call, &tile, width, changes, query, parts[B_GRAD_KEY]);
            add_rows(call, &tile, width, changes, parts[B_KEY],
                     parts[B_GRAD_QUERY] + start * width);
        }
        unpack(&call->grad_key, sample, head, first, num_keys, call->width, parts[B_GRAD_KEY],
               call->factor);
        unpack(&call->grad_value, sample, head, first, num_keys, call->value_width,
               parts[B_GRAD_VALUE], 1.0f);
    }
    unpack(&call->grad_query, sample, head, 0, num_queries, call->width, parts[B_GRAD_QUERY],
           call->factor);
}

/* ---- What Python calls ---- */

/* Floats that a thread works in. */
int64_t forward_room(const Call *call) {
    int64_t sizes[FORWARD_PARTS];
    forward_sizes(call, sizes);
    return total_of(sizes, FORWARD_PARTS);
}

int64_t backward_room(const Call *call) {
    int64_t sizes[BACKWARD_PARTS];
    backward_sizes(call, sizes);
    return total_of(sizes, BACKWARD_PARTS);
}

/* Work through heads nobody has taken; every thread calls, with a room of its own. */
void forward(const Call *call, float *room, _Atomic int64_t *next) {
    int64_t all = call->num_samples * call->num_heads;
    for (int64_t i; (i = atomic_fetch_add(next, 1)) < all;)
        attend(call, i / call->num_heads, i % call->num_heads, room);
}

void backward(const Call *call, float *room, _Atomic int64_t *next) {
    int64_t all = call->num_samples * call->num_heads;
    for (int64_t i; (i = atomic_fetch_add(next, 1)) < all;)
        differentiate(call, i / call->num_heads, i % call->num_heads, room);
}
