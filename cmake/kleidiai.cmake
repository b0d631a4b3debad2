# SPDX-License-Identifier: Apache-2.0
# KleidiAI as the target KleidiAI::kleidiai, for aarch64: an installed one (KleidiAI_DIR names its CMake files), or with
# VLLM_ARM_FETCH_KLEIDIAI=ON a pinned release built here.
option(VLLM_ARM_FETCH_KLEIDIAI "Download and build KleidiAI where none is installed" OFF)

find_package(KleidiAI CONFIG QUIET)
if(NOT KleidiAI_FOUND AND NOT VLLM_ARM_FETCH_KLEIDIAI)
  message(FATAL_ERROR
    "KleidiAI is not installed. Install it (Debian: libkleidiai-dev) and name its CMake files by KleidiAI_DIR, or set "
    "VLLM_ARM_FETCH_KLEIDIAI=1 to download and build it.")
endif()

if(NOT KleidiAI_FOUND)
  include(FetchContent)
  enable_language(C ASM)
  set(KLEIDIAI_BUILD_TESTS OFF CACHE BOOL "" FORCE)
  set(KLEIDIAI_BUILD_BENCHMARK OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(kleidiai
    GIT_REPOSITORY https://github.com/ARM-software/kleidiai.git GIT_TAG v1.30.0 GIT_SHALLOW TRUE)
  FetchContent_MakeAvailable(kleidiai)
endif()
