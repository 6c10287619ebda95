/* Tokens per tile of the tile kernels. Not every format and number of warps has a kernel for each;
 * qtool_matmul_plan_check refuses those that do not exist. */
#ifndef QT_TESTS_GPU_TILE_TOKENS_H
#define QT_TESTS_GPU_TILE_TOKENS_H

static const int tile_tokens[] = {16, 32, 48, 64, 96, 128, 160, 192, 224, 256};
enum { TILE_WIDTHS = sizeof tile_tokens / sizeof *tile_tokens };

#endif
