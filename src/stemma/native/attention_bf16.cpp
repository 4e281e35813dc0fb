// Attention over bf16: a translation unit of its own (units.h).
#include "attention.h"

#if STEMMA_FLOAT_DECODE
extern STEMMA_DECODE_OF_FLOATS;
#endif

template void run_bundle<bf16>(const AttendArgs&, Plan&, const Bundle&, Scratch&);
template void merge_token<bf16>(const AttendArgs&, const Plan&, int);
template void merge_parts_of<bf16>(const MergeArgs&, int64_t);
