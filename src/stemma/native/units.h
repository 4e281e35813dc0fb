// What other translation units compile: each of these is instantiated in one unit alone, or every unit that uses them
// would compile them again. They are entered once for many products, so calls between units cost nothing.
#pragma once

#include "attention.h"
#include "products.h"

#define STEMMA_UNITS_OF(T)                                                                                   \
    extern template void run_bundle<T>(const AttendArgs&, Plan&, const Bundle&, Scratch&);                   \
    extern template void merge_token<T>(const AttendArgs&, const Plan&, int);                                \
    extern template void merge_parts_of<T>(const MergeArgs&, int64_t);                                       \
    extern template void lay_out_block<T>(const Strips&, const T*, int64_t, int64_t, int64_t, char*);        \
    extern template Outputs dot_piece<T>(const Strips&, int64_t, int, const Inputs&, int64_t, int, float*);
STEMMA_UNITS_OF(bf16)
STEMMA_UNITS_OF(float)
#undef STEMMA_UNITS_OF
