// Products of floats with packed weights: a translation unit of its own (units.h).
#include "products.h"

template void lay_out_block<float>(const Strips&, const float*, int64_t, int64_t, int64_t, char*);
template Outputs dot_piece<float>(const Strips&, int64_t, int, const Inputs&, int64_t, int, float*);
