// Command archives makes and reads tars and zips with Go's own packages, for tests/python/test_archives.py.
//
//	archives tell FILE…         a line "archive PATH MEMBERS" or "archive PATH error MESSAGE" for each archive, then a line for each member:
//	                            "NAME TYPE MTIME BYTES", where BYTES is "-" for what is no regular file
//	archives make FORMAT FILE   an archive of the lines "NAME TYPE MTIME BYTES LINK" of standard input; FORMAT is ustar, gnu, pax,
//	                            zip (deflated and streamed) or zip-stored
//
// Names, paths, messages and bytes are in hexadecimal.
package main

import (
	"archive/tar"
	"archive/zip"
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"strconv"
	"strings"
	"time"
)

func main() {
	if len(os.Args) >= 2 && os.Args[1] == "tell" {
		out := bufio.NewWriter(os.Stdout)
		defer out.Flush()
		for _, path := range os.Args[2:] {
			var lines []string
			var err error
			if strings.HasSuffix(path, ".zip") {
				lines, err = tellZip(path)
			} else {
				lines, err = tellTar(path)
			}
			if err != nil {
				fmt.Fprintf(out, "archive %x error %x\n", path, err.Error())
				continue
			}
			fmt.Fprintf(out, "archive %x %d\n", path, len(lines))
			for _, line := range lines {
				fmt.Fprintln(out, line)
			}
		}
		return
	}
	if len(os.Args) == 4 && os.Args[1] == "make" {
		if err := write(os.Args[2], os.Args[3]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	fmt.Fprintln(os.Stderr, "archives tell FILE… | archives make FORMAT FILE")
	os.Exit(2)
}

var types = map[byte]string{
	tar.TypeReg: "file", '\x00': "file", tar.TypeCont: "file", tar.TypeGNUSparse: "file", tar.TypeDir: "dir",
	tar.TypeSymlink: "symlink", tar.TypeLink: "hardlink", tar.TypeChar: "device", tar.TypeBlock: "device", tar.TypeFifo: "device",
}

func tellTar(path string) (lines []string, err error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var plain io.Reader = f
	if strings.HasSuffix(path, ".gz") {
		if plain, err = gzip.NewReader(f); err != nil {
			return nil, err
		}
	}
	r := tar.NewReader(plain)
	for {
		h, err := r.Next()
		if err == io.EOF {
			return lines, nil
		}
		if err != nil {
			return nil, err
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			// No member, though Go counts it among them.
			continue
		}
		kind, known := types[h.Typeflag]
		if !known {
			kind = "special"
		}
		data := "-"
		if kind == "file" {
			b, err := io.ReadAll(r)
			if err != nil {
				return nil, err
			}
			data = hex.EncodeToString(b)
		}
		lines = append(lines, fmt.Sprintf("%x %s %d %s", h.Name, kind, h.ModTime.Unix(), data))
	}
}

func tellZip(path string) (lines []string, err error) {
	z, err := zip.OpenReader(path)
	if err != nil {
		return nil, err
	}
	defer z.Close()
	for _, f := range z.File {
		kind, data := "file", "-"
		switch mode := f.Mode(); {
		case strings.HasSuffix(f.Name, "/") || mode.IsDir():
			kind = "dir"
		case mode&os.ModeSymlink != 0:
			kind = "symlink"
		case mode&(os.ModeDevice|os.ModeNamedPipe) != 0:
			kind = "device"
		default:
			r, err := f.Open()
			if err != nil {
				return nil, err
			}
			b, err := io.ReadAll(r)
			if err != nil {
				return nil, err
			}
			data = hex.EncodeToString(b)
		}
		lines = append(lines, fmt.Sprintf("%x %s %d %s", f.Name, kind, f.Modified.Unix(), data))
	}
	return lines, nil
}

type entry struct {
	name, kind, link string
	mtime            time.Time
	data             []byte
}

func entries() (all []entry, err error) {
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadString('\n')
		if err == io.EOF {
			return all, nil
		}
		if err != nil {
			return nil, err
		}
		words := strings.Split(strings.TrimSuffix(line, "\n"), " ")
		name, err1 := hex.DecodeString(words[0])
		secs, err2 := strconv.ParseInt(words[2], 10, 64)
		data, err3 := hex.DecodeString(words[3])
		link, err4 := hex.DecodeString(words[4])
		for _, err := range []error{err1, err2, err3, err4} {
			if err != nil {
				return nil, err
			}
		}
		all = append(all, entry{string(name), words[1], string(link), time.Unix(secs, 0).UTC(), data})
	}
}

func write(format, path string) error {
	all, err := entries()
	if err != nil {
		return err
	}
	var out bytes.Buffer
	if strings.HasPrefix(format, "zip") {
		err = writeZip(&out, all, format == "zip-stored")
	} else {
		err = writeTar(&out, all, map[string]tar.Format{"ustar": tar.FormatUSTAR, "gnu": tar.FormatGNU, "pax": tar.FormatPAX}[format])
	}
	if err != nil {
		return err
	}
	return os.WriteFile(path, out.Bytes(), 0o644)
}

// An entry that the format cannot have is left out.
func writeTar(out io.Writer, all []entry, format tar.Format) error {
	w := tar.NewWriter(out)
	flags := map[string]byte{"file": tar.TypeReg, "dir": tar.TypeDir, "symlink": tar.TypeSymlink, "hardlink": tar.TypeLink, "device": tar.TypeFifo}
	for _, e := range all {
		h := &tar.Header{Typeflag: flags[e.kind], Name: e.name, Linkname: e.link, Size: int64(len(e.data)), Mode: 0o644, ModTime: e.mtime, Format: format}
		if w.WriteHeader(h) != nil {
			continue
		}
		if _, err := w.Write(e.data); err != nil {
			return err
		}
	}
	return w.Close()
}

func writeZip(out io.Writer, all []entry, stored bool) error {
	w := zip.NewWriter(out)
	for _, e := range all {
		h := &zip.FileHeader{Name: e.name, Modified: e.mtime, Method: zip.Deflate}
		if stored {
			// With its checksum and sizes in the local header, not behind the data.
			h.Method, h.CRC32 = zip.Store, crc32.ChecksumIEEE(e.data)
			h.SetModTime(e.mtime)
			h.CompressedSize64, h.UncompressedSize64 = uint64(len(e.data)), uint64(len(e.data))
			f, err := w.CreateRaw(h)
			if err == nil {
				_, err = f.Write(e.data)
			}
			if err != nil {
				return err
			}
			continue
		}
		f, err := w.CreateHeader(h)
		if err == nil && !strings.HasSuffix(e.name, "/") {
			_, err = f.Write(e.data)
		}
		if err != nil {
			return err
		}
	}
	return w.Close()
}
