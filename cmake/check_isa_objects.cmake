# SPDX-License-Identifier: Apache-2.0
# Fails where an object file exports a weak function: the linker would merge it with the same function of another
# variant, and the copy compiled for the larger instruction set could run on a CPU without it.
#   cmake -DNM=... -DOBJECTS=a.o;b.o -P check_isa_objects.cmake
foreach(object IN LISTS OBJECTS)
  execute_process(COMMAND ${NM} ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[0-9a-f]+ [WVu] [^\n]+" weak "${symbols}")
  if(weak)
    list(JOIN weak "\n  " weak)
    message(FATAL_ERROR "${object} exports weak symbols, which variants must not share:\n  ${weak}")
  endif()
endforeach()
