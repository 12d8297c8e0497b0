# Brings the patched llama.cpp to LONGHAUL_LLAMA_SOURCE and sets LONGHAUL_BUILD_ID.

find_package(Python3 3.10 REQUIRED COMPONENTS Interpreter)

set(default_cache "${LONGHAUL_ROOT}/build/downloads")
if(DEFINED ENV{LONGHAUL_CACHE_DIR})
    set(default_cache "$ENV{LONGHAUL_CACHE_DIR}")
endif()
set(LONGHAUL_CACHE_DIR "${default_cache}" CACHE PATH "Where the downloaded source package is kept")
set(LONGHAUL_LLAMA_SDIST "" CACHE FILEPATH "Source package of llama-cpp-python to use")

set(LONGHAUL_LLAMA_SOURCE "${CMAKE_BINARY_DIR}/llama.cpp")
set(script "${CMAKE_CURRENT_SOURCE_DIR}/get_source.py")
set(sdist_option "")
if(LONGHAUL_LLAMA_SDIST)
    set(sdist_option --sdist "${LONGHAUL_LLAMA_SDIST}")
endif()

# A changed, added or removed patch configures again.
file(GLOB patches CONFIGURE_DEPENDS "${LONGHAUL_ROOT}/patches/*.patch")
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${patches} "${script}" "${LONGHAUL_ROOT}/pyproject.toml" "${CMAKE_CURRENT_SOURCE_DIR}/include/longhaul.h")

execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${script}" source
        --cache "${LONGHAUL_CACHE_DIR}" ${sdist_option}
        --patches "${LONGHAUL_ROOT}/patches" --into "${LONGHAUL_LLAMA_SOURCE}"
    RESULT_VARIABLE failed)
if(failed)
    message(FATAL_ERROR "longhaul: llama.cpp's source is not there as wanted; the reason stands above")
endif()

execute_process(
    COMMAND "${Python3_EXECUTABLE}" "${script}" build-id --root "${LONGHAUL_ROOT}"
    OUTPUT_VARIABLE LONGHAUL_BUILD_ID
    OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed)
if(failed)
    message(FATAL_ERROR "longhaul: the build id cannot be computed; the reason stands above")
endif()
message(STATUS "longhaul build id: ${LONGHAUL_BUILD_ID}")
