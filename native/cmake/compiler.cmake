# Finds the compilers; says in one line what to install when they are missing or too old.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

include(CheckLanguage)
foreach(language C CXX)
    check_language(${language})
    if(NOT CMAKE_${language}_COMPILER)
        message(FATAL_ERROR "longhaul: no ${language} compiler found: apt-get install g++")
    endif()
    enable_language(${language})
endforeach()

if(NOT "cxx_std_17" IN_LIST CMAKE_CXX_COMPILE_FEATURES)
    message(FATAL_ERROR "longhaul: ${CMAKE_CXX_COMPILER} has no C++17: GCC 9, clang 10 or newer is needed")
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)
