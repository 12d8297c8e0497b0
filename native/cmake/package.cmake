# Puts every library into one folder, where each finds the others, and says what a wheel holds.

set(LONGHAUL_LIB_DIR "${CMAKE_BINARY_DIR}/lib" CACHE PATH "Where the libraries are put")
set(LONGHAUL_LIBRARIES longhaul longhaul-tools ${LONGHAUL_LLAMA_LIBRARIES})

if(APPLE)
    set(beside_me "@loader_path")
else()
    set(beside_me "$ORIGIN")
endif()

foreach(target ${LONGHAUL_LIBRARIES})
    set_target_properties(${target} PROPERTIES
        LIBRARY_OUTPUT_DIRECTORY "${LONGHAUL_LIB_DIR}"
        BUILD_WITH_INSTALL_RPATH ON
        INSTALL_RPATH "${beside_me}")
    # Without a version a library is one file of one name. Wheels keep no symbolic links.
    set_property(TARGET ${target} PROPERTY VERSION)
    set_property(TARGET ${target} PROPERTY SOVERSION)
    # Headers do not go into the wheel.
    set_property(TARGET ${target} PROPERTY PUBLIC_HEADER)
    set_property(TARGET ${target} PROPERTY PRIVATE_HEADER)
endforeach()

# Python compares it with lh_build_id() and so notices libraries of another version.
set(build_id_file "${CMAKE_BINARY_DIR}/build-id")
file(WRITE "${build_id_file}" "${LONGHAUL_BUILD_ID}\n")

install(TARGETS ${LONGHAUL_LIBRARIES} LIBRARY DESTINATION longhaul/lib COMPONENT longhaul)
install(FILES "${build_id_file}" "${CMAKE_CURRENT_SOURCE_DIR}/include/longhaul.h"
    DESTINATION longhaul/lib COMPONENT longhaul)
install(FILES "${LONGHAUL_LLAMA_SOURCE}/LICENSE"
    DESTINATION longhaul/lib RENAME LICENSE.llama.cpp COMPONENT longhaul)
