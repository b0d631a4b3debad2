// SPDX-License-Identifier: Apache-2.0
// From the types of a cache, known at run time, to those of an engine.
#pragma once

#include "attention/kv_cache.h"
#include "attention/kv_cache_types.h"

namespace vllm_arm {
namespace {

// How an element of an int8 cache is stored; its scale is the token's.
struct Int8 {
  std::int8_t value;
};

[[maybe_unused]] float to_float(Int8 stored) { return static_cast<float>(stored.value); }

// Calls `use<Element, Stored>()`: the type of queries, keys and values, and that in which the cache stores them.
template <typename Use>
void dispatch(const KvCache& cache, Use use) {
  const auto with = [&]<typename Element>() {
    switch (cache.type) {
      case KvCacheType::same: return use.template operator()<Element, Element>();
      case KvCacheType::fp8_e4m3: return use.template operator()<Element, Float8E4M3>();
      case KvCacheType::fp8_e5m2: return use.template operator()<Element, Float8E5M2>();
      case KvCacheType::int8: return use.template operator()<Element, Int8>();
    }
  };
  switch (cache.scalar_type) {
    case ScalarType::bfloat16: return with.template operator()<BFloat16>();
    case ScalarType::float16: return with.template operator()<Float16>();
    case ScalarType::float32: return with.template operator()<float>();
  }
}

}  // namespace
}  // namespace vllm_arm
