# Compiles through ccache where it exists, such that another clone in another folder hits as well.

option(LONGHAUL_CCACHE "Compile through ccache where it is installed" ON)
find_program(LONGHAUL_CCACHE_PROGRAM ccache)

if(LONGHAUL_CCACHE AND LONGHAUL_CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # Paths below the base folder are stored relative to it.
    string(FIND "${CMAKE_BINARY_DIR}/" "${LONGHAUL_ROOT}/" position)
    if(position EQUAL 0)
        set(base "${LONGHAUL_ROOT}")
    else()
        set(base "${CMAKE_BINARY_DIR}")
    endif()
    foreach(language C CXX)
        set(CMAKE_${language}_COMPILER_LAUNCHER
            "${CMAKE_COMMAND}" -E env "CCACHE_BASEDIR=${base}" CCACHE_NOHASHDIR=1 "${LONGHAUL_CCACHE_PROGRAM}")
    endforeach()
    message(STATUS "Compiling through ${LONGHAUL_CCACHE_PROGRAM} (off: -DLONGHAUL_CCACHE=OFF)")
endif()
# llama.cpp's own use of ccache knows no base folder.
set(GGML_CCACHE OFF)
