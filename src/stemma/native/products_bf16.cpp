// Products of bf16 with packed weights: a translation unit of its own (units.h).
#include "products.h"

template void lay_out_block<bf16>(const Strips&, const bf16*, int64_t, int64_t, int64_t, char*);
template Outputs dot_piece<bf16>(const Strips&, int64_t, int, const Inputs&, int64_t, int, float*);
