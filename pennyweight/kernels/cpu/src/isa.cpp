// One instruction set: compiled once for each, with its flags and PW_ISA as its name.
#include "dequantize.h"
#include "float_linear.h"
#include "int_linear.h"
#include "optimizer.h"
#include "bandwidth_probe.h"
#include "quantize.h"
#include "vtable.h"

#define PW_JOIN2(a, b) a##b
#define PW_JOIN(a, b) PW_JOIN2(a, b)

extern "C" const Table* PW_JOIN(pw_table_, PW_ISA)() {
    static const Table table = {int_linear, pack_codes, unpack_codes, probe, float_linear, dequantize, quantize,
                                ranges, finite, optim_steps};
    return &table;
}
