/* tour.h: in which order a workgroup visits the tiles that it walks over.
 *
 * FA_PLAIN: one after the other from the first that one of its rows sees to the
 * last.  FA_FULL: of those the ones in a list of blocks, if there is one; and
 * the tiles of sink keys before.  Always ascending.
 *
 * SPDX-License-Identifier: BSD-3-Clause */
#ifndef FA_KERNELS_TOUR_H
#define FA_KERNELS_TOUR_H

#include "problem.h"

enum { FA_NO_TILE = 0x7fffffff };

typedef struct fa_tour {
    fa_range range;
    int sink_tiles; /* from the start; 0: none */
    int entry;      /* of the list */
} fa_tour;

/* The list of blocks for a head of queries and the workgroup's rows. */
static FA_DEVICE const FA_GLOBAL int32_t *
fa_block_list(fa_args_in a, uint32_t place, int first)
{
    const FA_CONSTANT fa_blocks *x = &a->blocks;
    uint32_t at = fa_uniform(place);

    return (const FA_GLOBAL int32_t *)x->list + (int64_t)(at >> 16) * x->batch +
           (int64_t)(at & 0xffff) * x->head +
           (int64_t)(first / x->own) * (x->width + 1);
}

/* The first tile from `at` on that is in the list and, without looking at it,
 * in sight; `place` is of the queries. */
static FA_DEVICE int fa_tile_in_list(fa_args_in a, fa_tour *tour,
                                     uint32_t place, int first, int at)
{
    const FA_GLOBAL int32_t *list = fa_block_list(a, place, first);
    int tiles = a->blocks.walked / FA_WALK; /* of a block */
    int count = (int)fa_uniform((uint32_t)list[0]);

    for (; tour->entry < fa_min_int(count, a->blocks.width); tour->entry++) {
        int block = (int)fa_uniform((uint32_t)list[1 + tour->entry]);
        if (at < (block + 1) * tiles) {
            int tile = fa_max_int(at, block * tiles);
            bool hidden = tile >= tour->sink_tiles && tile < tour->range.begin;
            tile = hidden ? tour->range.begin : tile;
            if (tile < (block + 1) * tiles) {
                return tile < tour->range.end ? tile : (int)FA_NO_TILE;
            }
        }
    }
    return FA_NO_TILE;
}

/* The first tile from `at` on; FA_NO_TILE, or one that is not below range.end,
 * if there is none. */
template <int LEVEL>
static FA_DEVICE int fa_tile_from(fa_args_in a, fa_tour *tour, uint32_t place,
                                  int first, int at)
{
    if (LEVEL == FA_FULL && a->blocks.list != nullptr) {
        return fa_tile_in_list(a, tour, place, first, at);
    }
    bool hidden = LEVEL == FA_PLAIN || at >= tour->sink_tiles;
    return hidden ? fa_max_int(at, tour->range.begin) : at;
}

/* The tour of rows first .. first + rows - 1 and its first tile. */
template <int LEVEL, int PASS>
static FA_DEVICE int fa_start_tour(fa_args_in a, fa_tour *tour, uint32_t place,
                                   int first, int rows)
{
    tour->range = fa_range_of<LEVEL, PASS>(a, first, rows);
    tour->sink_tiles = (fa_sink_keys<LEVEL, PASS>(a) + FA_WALK - 1) / FA_WALK;
    tour->entry = 0;
    return fa_tile_from<LEVEL>(a, tour, place, first, 0);
}

/* Whether a wave of rows needs the tile; those it does not would change
 * nothing. */
static FA_DEVICE bool fa_is_active(const fa_range *wave, int sink_tiles, int t)
{
    return (t >= wave->begin || t < sink_tiles) && t < wave->end;
}

#endif
