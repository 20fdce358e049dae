// What WebAssembly exports by its name: tools/explorer.py links every function whose line begins with EXPORT.
#pragma once

#define EXPORT extern "C" __attribute__((visibility("default")))
