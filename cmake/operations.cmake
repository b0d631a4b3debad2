# SPDX-License-Identifier: Apache-2.0
# The one list of ops and their kernel variants. vllm_arm_operation(NAME FOLDER VARIANTS...) compiles
# csrc/FOLDER/NAME_<variant>.cpp for each variant that the target architecture has, with that variant's -march, and
# adds a row to operations.h, from which the kernel tables, the tests and the benchmarks are made.

set(VLLM_ARM_ISAS portable neon bf16 sve)
set(VLLM_ARM_FLAGS_portable)
if(CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  # AVX2 and FMA, which vLLM's own least build for x86 asks for too.
  set(VLLM_ARM_FLAGS_portable -march=x86-64-v3)
endif()
set(VLLM_ARM_FLAGS_neon -march=armv8.2-a+fp16+dotprod)
set(VLLM_ARM_FLAGS_bf16 -march=armv8.2-a+fp16+dotprod+bf16+i8mm)
set(VLLM_ARM_FLAGS_sve -march=armv8.2-a+fp16+dotprod+bf16+i8mm+sve)

set(VLLM_ARM_OPERATION_ROWS "")
set(VLLM_ARM_OPERATION_VARIANTS "")

function(vllm_arm_operation name folder)
  string(TOUPPER ${name} upper)
  set(row "#define VLLM_ARM_${upper}_VARIANTS(X)")
  foreach(isa IN LISTS ARGN)
    if(NOT isa IN_LIST VLLM_ARM_ISAS)
      message(FATAL_ERROR "${name}: unknown variant ${isa}, expected one of ${VLLM_ARM_ISAS}")
    endif()
    if(isa STREQUAL "portable" OR VLLM_ARM_TARGET_IS_AARCH64)
      string(APPEND row " X(${isa})")
      set_property(GLOBAL APPEND PROPERTY VLLM_ARM_SOURCES_${isa} csrc/${folder}/${name}_${isa}.cpp)
    endif()
  endforeach()
  set(VLLM_ARM_OPERATION_VARIANTS "${VLLM_ARM_OPERATION_VARIANTS}${row}\n" PARENT_SCOPE)
  set(VLLM_ARM_OPERATION_ROWS
      "${VLLM_ARM_OPERATION_ROWS} X(${name}, VLLM_ARM_${upper}_VARIANTS)" PARENT_SCOPE)
endfunction()

vllm_arm_operation(dequantise linear portable neon)
vllm_arm_operation(linear_int4 linear portable neon bf16)
vllm_arm_operation(panel_linear linear portable neon bf16)
vllm_arm_operation(quantise linear portable neon)
vllm_arm_operation(rms_norm norm portable neon bf16)
# Variants of these two go together: each has its own order of elements in the cache.
vllm_arm_operation(write_kv_cache attention portable neon bf16 sve)
vllm_arm_operation(paged_attention attention portable neon bf16 sve)
vllm_arm_operation(reduce_sum collectives portable neon bf16 sve)

file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/operations.h CONTENT
"// Generated from cmake/operations.cmake.
#pragma once
@VLLM_ARM_OPERATION_VARIANTS@#define VLLM_ARM_OPERATIONS(X)@VLLM_ARM_OPERATION_ROWS@
" @ONLY)
