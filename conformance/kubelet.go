// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	health "k8s.io/kubelet/pkg/apis/dra-health/v1"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// kubeletTimeout is the kubelet's limit of a call, defaultClientCallTimeout in
// k8s.io/kubernetes/pkg/kubelet/cm/dra/plugin.
const kubeletTimeout = 45 * time.Second

// kubelet calls one instance of the driver as the kubelet does.
type kubelet struct {
	driver       string
	local        func(string) string // returns a path of the driver as the suite sees it; nil for the same
	timeout      time.Duration       // of a call
	registration string              // path of the registration socket
	info         *registration.PluginInfo
	endpoint     string
	conn         *grpc.ClientConn
	plugin       dra.DRAPluginClient
	health       health.DRAResourceHealthClient

	mu    sync.Mutex
	calls []string // requests and responses of the case
}

// registrationSockets returns all sockets in the registry, including those the kubelet
// ignores: REG-01 reports them, and the other cases do not depend on it.
func registrationSockets(dir string) (paths []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if e.Type()&os.ModeSocket != 0 {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths, err
}

func dial(path string, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	return grpc.NewClient("unix:"+path, append(options, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
}

// dial connects to a socket of the driver, and records the calls.
func (k *kubelet) dial(path string) (*grpc.ClientConn, error) {
	return dial(path, grpc.WithUnaryInterceptor(k.record), grpc.WithStreamInterceptor(k.recordStream))
}

// getInfo calls GetInfo of a registration socket.
func (k *kubelet) getInfo(ctx context.Context, path string) (*registration.PluginInfo, error) {
	conn, err := k.dial(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return registration.NewRegistrationClient(conn).GetInfo(ctx, &registration.InfoRequest{})
}

// notify calls NotifyRegistrationStatus of a registration socket.
func (k *kubelet) notify(ctx context.Context, path string, s *registration.RegistrationStatus) error {
	conn, err := k.dial(path)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err = registration.NewRegistrationClient(conn).NotifyRegistrationStatus(ctx, s)
	return err
}

// register finds the driver's registration socket that is not among others, and
// registers the driver as the kubelet does.
func (k *kubelet) register(ctx context.Context, dir string, others []string) error {
	paths, err := registrationSockets(dir)
	if err != nil {
		return err
	}
	errs := []error{fmt.Errorf("%s has no registration socket of the driver", dir)}
	for _, path := range paths {
		if slices.Contains(others, path) {
			continue
		}
		info, err := k.getInfo(ctx, path)
		if err != nil {
			errs = append(errs, fmt.Errorf("GetInfo of %s: %w", filepath.Base(path), err))
			continue
		}
		k.registration, k.info = path, info
		err = k.notify(ctx, path, &registration.RegistrationStatus{PluginRegistered: true})
		if err != nil {
			return fmt.Errorf("NotifyRegistrationStatus: %w", err)
		}
		return k.connect(ctx, k.path(info.Endpoint))
	}
	return errors.Join(errs...)
}

// find finds the registration socket of a driver that runs on this node, and connects to
// the driver. It does not register the driver, because the kubelet has registered it.
func (k *kubelet) find(ctx context.Context, dir string) error {
	paths, err := registrationSockets(dir)
	if err != nil {
		return fmt.Errorf("find the driver: %w: is it the directory of the kubelet?", err)
	}
	for _, path := range paths {
		// Sockets of processes that have ended, and of other plugins, remain.
		info, err := k.getInfo(ctx, path)
		if err == nil && info.Name == k.driver && info.Type == registration.DRAPlugin {
			k.registration, k.info = path, info
			return k.connect(ctx, k.path(info.Endpoint))
		}
	}
	return fmt.Errorf("%s has no registration socket of the driver %s: does it run on this node?", dir, k.driver)
}

// path returns the suite's path of a file that the driver named.
func (k *kubelet) path(name string) string {
	if k.local == nil {
		return name
	}
	return k.local(name)
}

// connect connects to the DRA socket.
func (k *kubelet) connect(_ context.Context, endpoint string) (err error) {
	k.endpoint = endpoint
	k.conn, err = k.dial(endpoint)
	if err != nil {
		return err
	}
	k.plugin, k.health = dra.NewDRAPluginClient(k.conn), health.NewDRAResourceHealthClient(k.conn)
	return nil
}

func (k *kubelet) disconnect() error {
	if k.conn == nil {
		return nil
	}
	conn := k.conn
	k.conn = nil
	return conn.Close()
}

// call returns an error unless the driver responds to calls.
func (k *kubelet) call(ctx context.Context) error {
	_, err := k.plugin.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{}, grpc.WaitForReady(true))
	if unanswered(err) {
		return err
	}
	return nil // the driver responded, even if with an error
}

// unanswered reports whether a call ended without a response, because the driver has ended or did
// not respond in time.
func unanswered(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return true
	}
	return false
}

// serves returns an error unless the driver has the service that is called.
func (k *kubelet) serves(ctx context.Context) error {
	_, err := k.plugin.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{})
	if status.Code(err) == codes.Unimplemented {
		return err
	}
	return k.call(ctx)
}

// record is a client interceptor that keeps requests and responses for reports.
func (k *kubelet) record(
	ctx context.Context, method string, request, response any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	ctx, cancel := context.WithTimeout(ctx, k.timeout)
	defer cancel()
	err := invoke(ctx, method, request, response, conn, options...)
	k.note(method, text(request), response, err)
	return err
}

// note keeps a call, unless it repeats the last one.
func (k *kubelet) note(method, request string, response any, err error) {
	var result string
	if err != nil {
		result = err.Error()
	} else {
		result = text(response)
	}
	call := fmt.Sprintf("%s\n  request:  %s\n  response: %s", filepath.Base(method), request, result)
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.calls) == 0 || k.calls[len(k.calls)-1] != call {
		k.calls = append(k.calls, call)
	}
}

// recordStream is record for streams: each message of the driver is a response.
func (k *kubelet) recordStream(
	ctx context.Context, description *grpc.StreamDesc, conn *grpc.ClientConn, method string, streamer grpc.Streamer,
	options ...grpc.CallOption,
) (grpc.ClientStream, error) {
	stream, err := streamer(ctx, description, conn, method, options...)
	if err != nil {
		k.note(method, "", nil, err)
		return nil, err
	}
	return &recordedStream{ClientStream: stream, kubelet: k, method: method}, nil
}

// recordedStream keeps the messages of a stream.
type recordedStream struct {
	grpc.ClientStream
	kubelet         *kubelet
	method, request string
}

// SendMsg implements grpc.ClientStream.
func (s *recordedStream) SendMsg(message any) error {
	s.request = text(message)
	return s.ClientStream.SendMsg(message)
}

// RecvMsg implements grpc.ClientStream.
func (s *recordedStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	s.kubelet.note(s.method, s.request, message, err)
	return err
}

// takeCalls returns the calls since the last one.
func (k *kubelet) takeCalls() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	calls := k.calls
	k.calls = nil
	return calls
}

func text(message any) string {
	m, ok := message.(proto.Message)
	if !ok {
		return fmt.Sprint(message)
	}
	// prototext varies the space between fields on purpose.
	return strings.Join(strings.Fields(prototext.MarshalOptions{}.Format(m)), " ")
}

// prepare prepares claims in one call, and returns the response by claim UID.
func (k *kubelet) prepare(ctx context.Context, claims ...*dra.Claim) (map[string]*dra.NodePrepareResourceResponse,
	error) {
	response, err := k.plugin.NodePrepareResources(ctx, &dra.NodePrepareResourcesRequest{Claims: claims})
	if err != nil {
		return nil, fmt.Errorf("NodePrepareResources: %w", err)
	}
	return response.Claims, nil
}

// unprepare unprepares claims in one call, and returns the response by claim UID.
func (k *kubelet) unprepare(
	ctx context.Context, claims ...*dra.Claim,
) (map[string]*dra.NodeUnprepareResourceResponse, error) {
	response, err := k.plugin.NodeUnprepareResources(ctx, &dra.NodeUnprepareResourcesRequest{Claims: claims})
	if err != nil {
		return nil, fmt.Errorf("NodeUnprepareResources: %w", err)
	}
	return response.Claims, nil
}
