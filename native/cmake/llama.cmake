# Adds the patched llama.cpp: its libraries, and its tools as libraries, without their programs.

set(LONGHAUL_LLAMA_TOOLS
    llama-server-impl llama-cli-impl llama-bench-impl
    llama-completion-impl llama-perplexity-impl llama-quantize-impl)

set(BUILD_SHARED_LIBS ON)
set(LLAMA_BUILD_COMMON ON)
set(LLAMA_BUILD_TOOLS ON)
set(LLAMA_BUILD_SERVER ON)
set(LLAMA_BUILD_TESTS OFF)
set(LLAMA_BUILD_EXAMPLES OFF)
set(LLAMA_BUILD_APP OFF)
option(LLAMA_BUILD_UI "longhaul: build the server's chat page with npm" OFF)
set(LLAMA_USE_PREBUILT_UI OFF)
# GCC warns thousands of times about its own vector headers, which would drown the progress.
option(LLAMA_ALL_WARNINGS "llama: enable all compiler warnings" OFF)
option(LLAMA_OPENSSL "llama: use openssl to support HTTPS" OFF)
# Small, and without libraries of its own: other machines can be used with every build.
option(GGML_RPC "ggml: use RPC" ON)

# The source package carries no history. Git must not take the repository around the build folder
# for llama.cpp's: its commit would be compiled in, and no compilation would ever hit a cache.
set(LLAMA_BUILD_NUMBER 0)
set(LLAMA_BUILD_COMMIT "0c1e570")
set(ENV{GIT_CEILING_DIRECTORIES} "${CMAKE_BINARY_DIR}")
message(STATUS "llama.cpp looks for a git repository of its own: that it finds none is as it should be")

add_subdirectory("${LONGHAUL_LLAMA_SOURCE}" "${CMAKE_BINARY_DIR}/llama.cpp-build" EXCLUDE_FROM_ALL)

if(NOT LLAMA_BUILD_UI)
    # This step runs at every build, and every time it says at length that there is no web page.
    set_property(DIRECTORY "${LONGHAUL_LLAMA_SOURCE}/tools/ui" PROPERTY RULE_LAUNCH_CUSTOM
        "sh \"${CMAKE_CURRENT_SOURCE_DIR}/cmake/quietly.sh\"")
endif()

# Sets `out` to all shared libraries and loadable modules that a folder and those below it define.
function(longhaul_collect_libraries folder out)
    get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
    get_property(subfolders DIRECTORY "${folder}" PROPERTY SUBDIRECTORIES)
    set(found "")
    foreach(target ${targets})
        get_target_property(type ${target} TYPE)
        if(type MATCHES "^(SHARED|MODULE)_LIBRARY$")
            list(APPEND found ${target})
        endif()
    endforeach()
    foreach(subfolder ${subfolders})
        longhaul_collect_libraries("${subfolder}" below)
        list(APPEND found ${below})
    endforeach()
    set(${out} ${found} PARENT_SCOPE)
endfunction()

longhaul_collect_libraries("${LONGHAUL_LLAMA_SOURCE}" LONGHAUL_LLAMA_LIBRARIES)
# Of the tools only those that we link: nothing builds the rest.
list(FILTER LONGHAUL_LLAMA_LIBRARIES EXCLUDE REGEX "-impl$")
list(APPEND LONGHAUL_LLAMA_LIBRARIES ${LONGHAUL_LLAMA_TOOLS})
