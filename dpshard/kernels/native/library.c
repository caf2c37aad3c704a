/* What dpshard/kernels/native/library.py asks before it calls anything else. */

#include "cipher.h"
#include "tiles.h"

/* Counted up whenever a function of this folder is called in another way. */
int dpshard_interface(void)
{
    return 6;
}

/* Whether this processor has instructions for the cipher of release_keyed. */
int dpshard_has_cipher(void)
{
    return has_cipher();
}

/* Whether this processor has what gram.c and convolution.c work with. */
int dpshard_has_tiles(void)
{
    return tile_rows() > 0;
}
