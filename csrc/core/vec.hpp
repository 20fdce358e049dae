// Vectors and all that is done with them.
#pragma once

#include "core/functions.hpp"
#include "core/half.hpp"
#include "core/lanes.hpp"
#include "core/vectors.hpp"
