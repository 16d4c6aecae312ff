// Prints the entries of a tar or zip: hex name, mtime, hex bytes.
package main

import (
	"archive/tar"
	"archive/zip"
	"fmt"
	"io"
	"os"
	"strings"
)

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func main() {
	path := os.Args[1]
	if strings.HasSuffix(path, ".zip") {
		z, err := zip.OpenReader(path)
		check(err)
		for _, f := range z.File {
			r, err := f.Open()
			check(err)
			b, err := io.ReadAll(r)
			check(err)
			fmt.Printf("%x %d %x\n", f.Name, f.Modified.Unix(), b)
		}
		return
	}
	f, err := os.Open(path)
	check(err)
	t := tar.NewReader(f)
	for {
		h, err := t.Next()
		if err == io.EOF {
			return
		}
		check(err)
		if h.Typeflag != tar.TypeReg {
			check(fmt.Errorf("%s is no regular file", h.Name))
		}
		b, err := io.ReadAll(t)
		check(err)
		fmt.Printf("%x %d %x\n", h.Name, h.ModTime.Unix(), b)
	}
}
