# SPDX-License-Identifier: Apache-2.0
# oneDNN 3.x as the target DNNL::dnnl: an installed one (dnnl_DIR names its CMake files), or with
# VLLM_ARM_FETCH_ONEDNN=ON a pinned release built here, with Arm's Compute Library where the target is Arm.
option(VLLM_ARM_FETCH_ONEDNN "Download and build oneDNN where none is installed" OFF)

find_package(dnnl 3.1 CONFIG QUIET)
if(NOT dnnl_FOUND AND NOT VLLM_ARM_FETCH_ONEDNN)
  message(FATAL_ERROR
    "oneDNN 3.1 or later is not installed. Install it (on x86: pip install onednn-devel-cpu-gomp; Debian: libdnnl-dev) "
    "and name its CMake files by dnnl_DIR, or set VLLM_ARM_FETCH_ONEDNN=1 to download and build it.")
endif()

if(NOT dnnl_FOUND)
  include(FetchContent)
  if(VLLM_ARM_TARGET_IS_AARCH64)
    # Built now, for oneDNN looks for its library files when it is configured. oneDNN 3.12 takes 52.4 and later.
    FetchContent_Declare(compute_library
      GIT_REPOSITORY https://github.com/ARM-software/ComputeLibrary.git GIT_TAG v52.6.0 GIT_SHALLOW TRUE
      SOURCE_SUBDIR none)
    FetchContent_MakeAvailable(compute_library)
    set(build ${compute_library_SOURCE_DIR}/build)
    execute_process(
      COMMAND ${CMAKE_COMMAND} -S ${compute_library_SOURCE_DIR} -B ${build} -DCMAKE_BUILD_TYPE=Release
              -DCMAKE_POSITION_INDEPENDENT_CODE=ON -DARM_COMPUTE_ARCH=armv8.2-a -DARM_COMPUTE_BUILD_SHARED_LIB=OFF
              -DARM_COMPUTE_ENABLE_OPENMP=ON -DARM_COMPUTE_ENABLE_CPPTHREADS=OFF -DARM_COMPUTE_ENABLE_WERROR=OFF
              -DARM_COMPUTE_BUILD_TESTING=OFF -DARM_COMPUTE_BUILD_EXAMPLES=OFF
      COMMAND_ERROR_IS_FATAL ANY)
    execute_process(COMMAND ${CMAKE_COMMAND} --build ${build} --parallel COMMAND_ERROR_IS_FATAL ANY)
    set(ENV{ACL_ROOT_DIR} ${compute_library_SOURCE_DIR})
    set(ONEDNN_AARCH64_USE_ACL ON CACHE BOOL "" FORCE)
  endif()
  set(ONEDNN_LIBRARY_TYPE STATIC CACHE STRING "" FORCE)
  set(ONEDNN_CPU_RUNTIME OMP CACHE STRING "" FORCE)
  set(ONEDNN_BUILD_DOC OFF CACHE BOOL "" FORCE)
  set(ONEDNN_BUILD_EXAMPLES OFF CACHE BOOL "" FORCE)
  set(ONEDNN_BUILD_TESTS OFF CACHE BOOL "" FORCE)
  set(ONEDNN_ENABLE_WORKLOAD INFERENCE CACHE STRING "" FORCE)
  set(ONEDNN_ENABLE_PRIMITIVE "MATMUL;REORDER" CACHE STRING "" FORCE)
  set(ONEDNN_BUILD_GRAPH OFF CACHE BOOL "" FORCE)
  FetchContent_Declare(onednn
    GIT_REPOSITORY https://github.com/uxlfoundation/oneDNN.git GIT_TAG v3.12.4 GIT_SHALLOW TRUE)
  FetchContent_MakeAvailable(onednn)
  add_library(DNNL::dnnl ALIAS dnnl)
endif()

# Links oneDNN, without its headers, into TARGET and puts a shared one beside it, in lib/, where TARGET's run path finds
# it: an installed package then needs no other.
function(vllm_arm_bundle_onednn target)
  target_link_libraries(${target} PRIVATE $<TARGET_LINKER_FILE:DNNL::dnnl>)
  get_target_property(imported DNNL::dnnl IMPORTED)
  if(imported)
    target_link_options(${target} PRIVATE "-Wl,-rpath,$ORIGIN/lib")
    add_custom_command(TARGET ${target} POST_BUILD VERBATIM
      COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/lib
      COMMAND ${CMAKE_COMMAND} -E copy $<TARGET_FILE:DNNL::dnnl>
              ${CMAKE_BINARY_DIR}/lib/$<TARGET_SONAME_FILE_NAME:DNNL::dnnl>)
  endif()
endfunction()
