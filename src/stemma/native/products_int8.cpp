// Products of int8 inputs with packed codes: a translation unit of its own (units.h).
#include "int8_products.h"

void dot_int8(Int8Piece piece) { piece.run(); }
