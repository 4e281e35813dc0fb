// Attention over floats: a translation unit of its own (units.h).
#include "attention.h"

template void run_bundle<float>(const AttendArgs&, Plan&, const Bundle&, Scratch&);
template void merge_token<float>(const AttendArgs&, const Plan&, int);
template void merge_parts_of<float>(const MergeArgs&, int64_t);
#if STEMMA_FLOAT_DECODE
STEMMA_DECODE_OF_FLOATS;
#endif
