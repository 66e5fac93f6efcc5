// Products of matrices by the process's BLAS: what is large and lies as BLAS takes it.
#pragma once

#include <climits>

#include "abi.h"
#include "gemm.h"

namespace shardwright {

// A matrix as BLAS sees it: transposed or not, and how far its lines lie apart; 0 if it cannot.
struct Lines {
    bool transposed;
    int64_t apart;
};

inline Lines lines_of(int64_t rows, int64_t columns, int64_t row, int64_t column) {
    if (rows == 1 && columns == 1) return {false, 1};
    if ((columns == 1 || column == 1) && (rows == 1 || row >= columns))
        return {false, rows == 1 ? columns : row};
    if ((rows == 1 || row == 1) && (columns == 1 || column >= rows))
        return {true, columns == 1 ? rows : column};
    return {false, 0};
}

template <class T> auto blas_gemm() {
    if constexpr (sizeof(T) == sizeof(float))
        return blas.sgemm;
    else
        return blas.dgemm;
}

template <class T> bool blas_takes(const Product<T>& p) {
    if (!blas_gemm<T>()) return false;
    Lines a = lines_of(p.m, p.k, p.a_row, p.a_column), b = lines_of(p.k, p.n, p.b_row, p.b_column);
    int64_t largest = std::max({p.m, p.n, p.k, a.apart, b.apart, p.c_row});
    return a.apart && b.apart && (p.m == 1 || p.c_row >= p.n) && largest <= INT_MAX;
}

// c = alpha * a b + beta * c. Row-major c is column-major c', and c' = b' a'.
template <class T> void blas_multiply(const Product<T>& p, T beta) {
    Lines a = lines_of(p.m, p.k, p.a_row, p.a_column), b = lines_of(p.k, p.n, p.b_row, p.b_column);
    int m = int(p.m), n = int(p.n), k = int(p.k), lda = int(a.apart), ldb = int(b.apart);
    int ldc = int(std::max<int64_t>(p.c_row, p.n));
    blas_gemm<T>()(b.transposed ? "T" : "N", a.transposed ? "T" : "N", &n, &m, &k, &p.alpha, p.b,
                   &ldb, p.a, &lda, &beta, p.c, &ldc);
}

}  // namespace shardwright
